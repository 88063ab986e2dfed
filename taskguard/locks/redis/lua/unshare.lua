-- Ends an owner's share of a key, or its wait for one. Waiters with room get shares.
-- KEYS: the key's lock, its line.   ARGV: owner.
-- Returns 1 if it had a share that was not only reserved.
local lock, line, owner = KEYS[1], KEYS[2], ARGV[1]
local waiting = line_of_waiters()
local waited = waiting.leave(lock, line, owner)
local held = waiting.sharers(lock)
local had = held and redis.call('ZREM', lock, owner) == 1
if held and (had or waited) then
  waiting.keep_for_first(lock, line, redis.call('ZCARD', lock))
end
return had and not waited and 1 or 0
