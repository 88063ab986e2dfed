-- Sets a value unless it was set with a newer fence. The same fence may set it again.
-- KEYS: the hash with the fields "value" and "fence".   ARGV: value, fence.
-- Returns the stored fence: the given one, or a newer one, which refused the write.
local fence = redis.call('HGET', KEYS[1], 'fence')
if fence then
  if not string.find(fence, '^[1-9]%d*$') then
    return redis.error_reply('ERR taskguard: the field "fence" is no fencing token')
  end
  -- Compare decimal texts, because Lua's numbers are exact up to 2^53 only. The longer text is larger.
  if #fence > #ARGV[2] or (#fence == #ARGV[2] and fence > ARGV[2]) then
    return fence
  end
end
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'fence', ARGV[2])
return ARGV[2]
