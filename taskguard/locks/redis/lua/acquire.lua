-- Takes all keys for one owner or none of them; the same owner gets the same grant again.
-- KEYS: for each key its lock, its fence, its line.
-- ARGV: owner, lease in ms, 1 for a token, 1 if it waits when refused, fence expiry in ms;
--       where it is given, the least token.
-- Answers {1, token, 1 if they were all the owner's already}, or {0, number of the key that is taken, its owner, its pttl}.
local owner, ttl_ms, waits = ARGV[1], ARGV[2], ARGV[4] == '1'

local function refuse(taken, holder)
  -- It waits in one line. In no other one it keeps a key from those who wait for that alone.
  for i = 1, #KEYS, 3 do
    if i ~= taken then
      step_back(KEYS[i], KEYS[i + 2], owner)
    end
  end
  local lock, line = KEYS[taken], KEYS[taken + 2]
  local left_ms = redis.call('PTTL', lock)
  if waits then
    join(lock, line, owner)
  end
  if redis.call('ZSCORE', line, holder) and not (waits and redis.call('ZCARD', line) < MANY) then
    left_ms = ASK_MS -- it is kept for one who comes and has a whole lease then
  end
  return {0, (taken + 2) / 3, holder, left_ms}
end

-- Whether what is kept for the holder goes to the owner, who is before it in the line: it was
-- called, and came late.
local function goes_before(line, holder)
  local place = redis.call('ZSCORE', line, owner)
  local theirs = place and redis.call('ZSCORE', line, holder)
  return theirs and tonumber(place) < tonumber(theirs)
end

local mine, lined = 0, false
for i = 1, #KEYS, 3 do
  local lock, line = KEYS[i], KEYS[i + 2]
  local value = redis.call('GET', lock)
  local others = redis.call('EXISTS', line) == 1
  if others and not value then
    -- A lease ran out, or somebody did not come. Whoever asks is heard of.
    try('PEXPIRE', beside(lock, ':waits:', owner), WAITS_MS)
    value = keep_for_first(lock, line)
  end
  if value == owner then
    mine = mine + 3
  elseif value and not (others and goes_before(line, value)) then
    return refuse(i, value)
  end
  lined = lined or others
end

-- The locks are written before the fences: a server that is full refuses the first write of a
-- script and lets the others pass, so nothing is half done. PEXPIRE is never refused.
local again = mine == #KEYS and 1 or 0
for i = 1, #KEYS, 3 do
  if mine == #KEYS then
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  else
    redis.call('SET', KEYS[i], owner, 'PX', ttl_ms)
  end
  if lined and leave(KEYS[i], KEYS[i + 2], owner) then
    again = 0 -- it was kept for it, not held
  end
end
if ARGV[3] ~= '1' then
  return {1, '0', again}
end

local last = 0
for i = 2, #KEYS, 3 do
  last = math.max(last, tonumber(redis.call('GET', KEYS[i]) or 0) or 0)
end
local least = tonumber(ARGV[6] or 0)
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
for i = 2, #KEYS, 3 do
  redis.call('SET', KEYS[i], text, 'PX', keep_ms)
end
return {1, text, again}
