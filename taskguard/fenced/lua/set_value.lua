-- Sets a value unless it was set with a newer fence; the same fence may set it again.
-- KEYS: the hash with the fields "value" and "fence".   ARGV: value, fence.
-- Answers the fence that is there now: the given one, or the newer one that refused it.
local fence = redis.call('HGET', KEYS[1], 'fence')
if fence then
  if not string.find(fence, '^[1-9]%d*$') then
    return redis.error_reply('ERR taskguard: the field "fence" is no fencing token')
  end
  -- Decimal texts, since Lua's numbers are exact up to 2^53 only: the longer one is larger.
  if #fence > #ARGV[2] or (#fence == #ARGV[2] and fence > ARGV[2]) then
    return fence
  end
end
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'fence', ARGV[2])
return ARGV[2]
