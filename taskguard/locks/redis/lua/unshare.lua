-- Ends an owner's share of a key, or its wait for one; those come in who may then.
-- KEYS: the key's lock, its line.   ARGV: owner.
-- Answers 1 if it had one, but for one that was only kept for it.
local lock, line, owner = KEYS[1], KEYS[2], ARGV[1]
local waiting = line_of_waiters()
local waited = waiting.leave(lock, line, owner)
local held = waiting.sharers(lock)
local had = held and redis.call('ZREM', lock, owner) == 1
if held and (had or waited) then
  waiting.keep_for_first(lock, line, redis.call('ZCARD', lock))
end
return had and not waited and 1 or 0
