-- Frees the keys that are still the owner's and wakes one waiter of each; others' stay untouched.
-- KEYS: for each key its lock, its waiters flag, its wake list.
-- ARGV: owner, wake list expiry in ms.
-- Answers how many were freed.
local freed = 0
for i = 1, #KEYS, 3 do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    freed = freed + 1
    if redis.call('EXISTS', KEYS[i + 1]) == 1 then
      -- One element at most: only one waiter can have the key, and nobody may come to fetch it.
      redis.call('DEL', KEYS[i + 2])
      redis.call('LPUSH', KEYS[i + 2], '1')
      redis.call('PEXPIRE', KEYS[i + 2], ARGV[2])
    end
  end
end
return freed
