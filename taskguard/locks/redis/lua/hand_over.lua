-- Hands the keys that the finder still holds over to their true owner, which can then renew them.
-- KEYS: the locks.   ARGV: finder, true owner, lease in ms.
-- Returns how many keys the true owner holds. A repeated call changes nothing.
local handed = 0
for i = 1, #KEYS do
  local value = redis.pcall('GET', KEYS[i]) -- a shared key has another type
  if value == ARGV[1] then
    redis.call('SET', KEYS[i], ARGV[2], 'PX', ARGV[3])
    handed = handed + 1
  elseif value == ARGV[2] then
    handed = handed + 1
  end
end
return handed
