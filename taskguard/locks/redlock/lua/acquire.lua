-- Takes all keys for one owner, or none. If the owner has them already, it gets the same grant again.
-- KEYS: for each key its lock, its waiters flag, its wake list.
-- ARGV: owner, lease in ms, waiters flag in ms (0: does not wait), wake list expiry in ms.
-- Returns {1}, or {0, number of the key that is taken, its owner, its pttl}.
local owner, ttl_ms, waits_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

-- If a release woke a waiter for several keys, and another of these keys is taken, passes the wake-up
-- on to a waiter that needs the free key only.
local function pass_on()
  for i = 1, #KEYS, 3 do
    if redis.call('EXISTS', KEYS[i]) == 0 and redis.call('EXISTS', KEYS[i + 1]) == 1 then
      redis.call('DEL', KEYS[i + 2])
      redis.pcall('LPUSH', KEYS[i + 2], '1')
      redis.call('PEXPIRE', KEYS[i + 2], ARGV[4])
    end
  end
end

local mine = 0
for i = 1, #KEYS, 3 do
  local value = redis.call('GET', KEYS[i])
  if value == owner then
    mine = mine + 3
  elseif value then
    -- pcall: a server without memory still reports that the key is taken. The caller then polls.
    if waits_ms > 0 and redis.call('PTTL', KEYS[i + 1]) < waits_ms then
      redis.pcall('SET', KEYS[i + 1], '1', 'PX', waits_ms)
    end
    if #KEYS > 3 then
      pass_on()
    end
    return {0, (i + 2) / 3, value, redis.call('PTTL', KEYS[i])}
  end
end

-- A server without memory refuses the first write of a script, so no grant is incomplete. It never
-- refuses PEXPIRE.
for i = 1, #KEYS, 3 do
  if mine == #KEYS then
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  else
    redis.call('SET', KEYS[i], owner, 'PX', ttl_ms)
  end
end
return {1}
