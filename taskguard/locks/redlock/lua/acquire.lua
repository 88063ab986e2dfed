-- Takes all keys for one owner or none of them; the same owner gets the same grant again.
-- KEYS: for each key its lock, its fence, its waiters flag, its wake list.
-- ARGV: owner, lease in ms, 1 for a token, waiters flag in ms (0: does not wait),
--       fence expiry in ms, wake list expiry in ms; where it is given, the least token.
-- Answers {1, token, 1 if they were all the owner's already}, or {0, number of the key that is taken, its owner, its pttl}.
local owner, ttl_ms, waits_ms = ARGV[1], ARGV[2], tonumber(ARGV[4])

-- A waiter for several keys was woken by one that is free, but another is taken: whoever waits
-- for the free one alone must hear of it.
local function pass_on()
  for i = 1, #KEYS, 4 do
    if redis.call('EXISTS', KEYS[i]) == 0 and redis.call('EXISTS', KEYS[i + 2]) == 1 then
      redis.call('DEL', KEYS[i + 3])
      redis.pcall('LPUSH', KEYS[i + 3], '1')
      redis.call('PEXPIRE', KEYS[i + 3], ARGV[6])
    end
  end
end

local mine = 0
for i = 1, #KEYS, 4 do
  local value = redis.call('GET', KEYS[i])
  if value == owner then
    mine = mine + 4
  elseif value then
    -- pcall: a server that is full still tells that the key is taken; the caller then polls.
    if waits_ms > 0 and redis.call('PTTL', KEYS[i + 2]) < waits_ms then
      redis.pcall('SET', KEYS[i + 2], '1', 'PX', waits_ms)
    end
    if #KEYS > 4 then
      pass_on()
    end
    return {0, (i + 3) / 4, value, redis.call('PTTL', KEYS[i])}
  end
end

-- The locks are written before the fences: a server that is full refuses the first write of a
-- script and lets the others pass, so nothing is half done. PEXPIRE is never refused.
for i = 1, #KEYS, 4 do
  if mine == #KEYS then
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  else
    redis.call('SET', KEYS[i], owner, 'PX', ttl_ms)
  end
end
local again = mine == #KEYS and 1 or 0
if ARGV[3] ~= '1' then
  return {1, '0', again}
end

local last = 0
for i = 2, #KEYS, 4 do
  last = math.max(last, tonumber(redis.call('GET', KEYS[i]) or 0) or 0)
end
local least = tonumber(ARGV[7] or 0)
if again == 1 and last > 0 and last >= least then
  return {1, string.format('%.0f', last), again}
end
-- max(last + 1, clock): an expired or lost fence cannot make tokens go back. The fence outlives
-- the time by which it is ahead of the clock.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = math.max(last + 1, least, now)
if again == 1 and last > 0 then
  token = least -- the same grant: it rises to what another of its keys was given
end
local text = string.format('%.0f', token)
local keep_ms = string.format('%.0f', ARGV[5] + math.max(0, math.floor((token - now) / 1000)))
for i = 2, #KEYS, 4 do
  redis.call('SET', KEYS[i], text, 'PX', keep_ms)
end
return {1, text, again}
