-- Takes all keys for one owner, or none. If the owner has them already, it gets the same grant again.
-- KEYS: for each key its lock, its fence, its line.
-- ARGV: owner, lease in ms, 1 for a token, 1 if it waits when refused, fence expiry in ms;
--       optional: the least token; the owner for which a single key is reserved (PROMOTED), whose
--       reservation this owner takes.
-- Returns {1, token, 1 if the owner had all of them already},
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
    if type(value) == 'table' then -- the key has another type
      waiting = waiting or line_of_waiters()
      shared = (waiting.sharers(lock) or redis.call('GET', lock)) > 0 -- GET raises its error
      value = shared and waiting.longest(lock)
    end
    -- The position of the owner, if the lock is only reserved for it.
    local theirs = value and not shared and redis.call('ZSCORE', line, value)
    if theirs or not value or waits or #KEYS > 3 then
      waiting = waiting or line_of_waiters()
    end
    if not value then
      -- A lease expired, or a waiter did not take its reservation. This owner is alive.
      waiting.hear(lock, owner)
      value = waiting.keep_for_first(lock, line)
      theirs = value and redis.call('ZSCORE', line, value)
    end
    if value == owner then
      mine = mine + 3
    elseif value then
      local place = theirs and redis.call('ZSCORE', line, owner)
      -- If the key is reserved for a later waiter, the owner takes it: it was passed over as late.
      if not (place and tonumber(place) < tonumber(theirs)) then
        -- The owner waits in this line only, so that it holds no reservations of other keys.
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
          left_ms = waiting.ASK_MS -- the owner of the reservation comes and gets a whole lease
        end
        return {0, (i + 2) / 3, value, left_ms, shared and 1 or 0}
      end
    end
  end
end

-- Write the locks before the fences: a server without memory refuses the first write of a script
-- and accepts later ones, so no grant is incomplete. It never refuses PEXPIRE.
local again = mine == #KEYS and 1 or 0
for i = 1, #KEYS, 3 do
  if mine == #KEYS then
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  else
    redis.call('SET', KEYS[i], owner, 'PX', ttl_ms)
  end
  if waiting and waiting.leave(KEYS[i], KEYS[i + 2], owner) then
    again = 0 -- the key was reserved for the owner, not held
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
-- max(last + 1, clock): tokens grow even if a fence has expired or was lost. A fence that is ahead
-- of the clock is kept for longer by that difference.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = math.max(last + 1, least, now)
if again == 1 and last > 0 then
  token = least -- the same grant, raised to the token of its other keys
end
local text = string.format('%.0f', token)
local keep_ms = string.format('%.0f', ARGV[5] + math.max(0, math.floor((token - now) / 1000)))
for i = 2, #KEYS, 3 do
  redis.call('SET', KEYS[i], text, 'PX', keep_ms)
end
return {1, text, again}
