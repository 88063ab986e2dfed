-- Takes all keys for one owner or none of them; the same owner gets the same grant again.
-- KEYS: for each key its lock, its fence, its line.
-- ARGV: owner, lease in ms, 1 for a token, 1 if it waits when refused, fence expiry in ms;
--       where they are given, the least token; whoever is called to the one key: what is kept for
--       that one is this owner's.
-- Answers {1, token, 1 if they were all the owner's already},
--      or {0, number of the key that is taken, its owner, its pttl, 1 if it is shared}.
local owner, ttl_ms, waits = ARGV[1], ARGV[2], ARGV[4] == '1'

if ARGV[7] and redis.pcall('GET', KEYS[1]) == ARGV[7] then
  redis.call('SET', KEYS[1], owner, 'PX', ttl_ms)
end

local mine, waiting = 0, nil
for i = 1, #KEYS, 3 do
  local lock, line = KEYS[i], KEYS[i + 2]
  if redis.call('EXISTS', lock, line) > 0 then
    local value, shared = redis.pcall('GET', lock), false
    if type(value) == 'table' then -- it is of another type
      waiting = waiting or line_of_waiters()
      shared = (waiting.sharers(lock) or redis.call('GET', lock)) > 0 -- GET raises what it said
      value = shared and waiting.longest(lock)
    end
    local theirs = value and not shared and redis.call('ZSCORE', line, value) -- if it is only kept
    if theirs or not value or waits or #KEYS > 3 then
      waiting = waiting or line_of_waiters()
    end
    if not value then
      -- A lease ran out, or somebody did not come. Whoever asks is heard of.
      waiting.hear(lock, owner)
      value = waiting.keep_for_first(lock, line)
      theirs = value and redis.call('ZSCORE', line, value)
    end
    if value == owner then
      mine = mine + 3
    elseif value then
      local place = theirs and redis.call('ZSCORE', line, owner)
      -- What is kept for one who is behind the owner is the owner's: it was called, and is late.
      if not (place and tonumber(place) < tonumber(theirs)) then
        -- It waits in one line. In no other one it keeps a key from those who wait for that alone.
        for other = 1, #KEYS, 3 do
          if other ~= i then
            waiting.step_back(KEYS[other], KEYS[other + 2], owner)
          end
        end
        local left_ms = redis.call('PTTL', lock)
        if waits then
          waiting.join(lock, line, owner, '1')
        end
        local kept = theirs and left_ms <= waiting.ASK_MS -- or the server's clock was set back
        if kept and not (waits and redis.call('ZCARD', line) < waiting.MANY) then
          left_ms = waiting.ASK_MS -- it is kept for one who comes and has a whole lease then
        end
        return {0, (i + 2) / 3, value, left_ms, shared and 1 or 0}
      end
    end
  end
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
  if waiting and waiting.leave(KEYS[i], KEYS[i + 2], owner) then
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
