-- Frees the keys that the owner still holds, and wakes one waiter of each.
-- KEYS: for each key its lock, its waiters flag, its wake list.
-- ARGV: owner, wake list expiry in ms.
-- Returns how many it freed.
local freed = 0
for i = 1, #KEYS, 3 do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    freed = freed + 1
    if redis.call('EXISTS', KEYS[i + 1]) == 1 then
      -- Keep one element at most: only one waiter can get the key, and it may never fetch the element.
      redis.call('DEL', KEYS[i + 2])
      redis.call('LPUSH', KEYS[i + 2], '1')
      redis.call('PEXPIRE', KEYS[i + 2], ARGV[2])
    end
  end
end
return freed
