-- Takes a share of a key for one owner if fewer than `limit` owners hold it and no earlier waiter
-- waits. If the owner has a share already, it gets the same grant again.
-- KEYS: the key's lock, its fence, its line.
-- ARGV: owner, lease in ms, 1 for a token, 1 if it waits when refused, fence expiry in ms, limit.
-- Returns {1, token}, or {0, 1, a holder, its remaining ms, 1 if the key is shared}.
local lock, fence, line = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl_ms, waits, limit = ARGV[1], tonumber(ARGV[2]), ARGV[4] == '1', tonumber(ARGV[6])

local waiting = line_of_waiters()
local held = waiting.sharers(lock)
local in_line = redis.call('EXISTS', line) == 1
local mine = held and redis.call('ZSCORE', lock, owner)
if in_line and not mine then
  -- Join the line, if only for this call, and let waiters with room take their shares.
  waiting.join(lock, line, owner, ARGV[6])
  if held then
    waiting.keep_for_first(lock, line, held)
    held = waiting.sharers(lock)
    mine = held and redis.call('ZSCORE', lock, owner)
  end
elseif held and held < limit then
  mine = mine or 'there is room'
end

if not mine then
  if waits then
    waiting.join(lock, line, owner, ARGV[6])
  elseif in_line then
    waiting.leave(lock, line, owner)
  end
  local value, left_ms
  if held then
    local first = redis.call('ZRANGE', lock, 0, 0, 'WITHSCORES') -- the share that ends first
    value, left_ms = first[1], tonumber(first[2]) - waiting.now_ms()
  else
    value, left_ms = redis.call('GET', lock), redis.call('PTTL', lock)
  end
  if redis.call('ZSCORE', line, value) and not (waits and redis.call('ZCARD', line) < waiting.MANY) then
    left_ms = waiting.ASK_MS -- the owner of the reservation comes and gets a whole lease
  end
  return {0, 1, value, left_ms, held and 1 or 0}
end

-- The owners that share a key have one token, above all earlier ones. The first owner with a share
-- gets a new token; reserved shares do not count. Write the lock first, because a server without
-- memory refuses the first write.
local longest = waiting.longest(lock)
local beside = longest and (longest == owner or not redis.call('ZSCORE', line, longest))
waiting.share(lock, owner, ttl_ms)
if waiting.leave(lock, line, owner) and longest == owner then
  beside = false -- the share was reserved for the owner, not held
end
if ARGV[3] ~= '1' then
  return {1, '0'}
end
local token = tonumber(redis.call('GET', fence) or 0) or 0
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if not beside or token == 0 then
  token = math.max(token + 1, now)
end
local text = string.format('%.0f', token)
local keep_ms = ARGV[5] + math.max(0, math.floor((token - now) / 1000))
redis.call('SET', fence, text, 'PX', string.format('%.0f', keep_ms))
return {1, text}
