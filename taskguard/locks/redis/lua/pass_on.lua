-- Wakes one waiter of a key that is free: whoever was woken for it could not take it.
-- KEYS: its lock, its waiters flag, its wake list.   ARGV: wake list expiry in ms.
-- Answers whether there was one.
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('EXISTS', KEYS[2]) == 0 then
  return 0
end
redis.call('DEL', KEYS[3])
redis.call('LPUSH', KEYS[3], '1')
redis.call('PEXPIRE', KEYS[3], ARGV[1])
return 1
