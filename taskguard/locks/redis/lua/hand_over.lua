-- Hands the keys that are still the finder's over to their true owner, whose renewals then go on.
-- KEYS: the locks.   ARGV: finder, true owner, lease in ms.
-- Answers how many are the true owner's; asked twice it changes nothing.
local handed = 0
for i = 1, #KEYS do
  local value = redis.pcall('GET', KEYS[i]) -- a key that is shared is of another type
  if value == ARGV[1] then
    redis.call('SET', KEYS[i], ARGV[2], 'PX', ARGV[3])
    handed = handed + 1
  elseif value == ARGV[2] then
    handed = handed + 1
  end
end
return handed
