-- Frees the keys that the owner still holds, and reserves each for its first waiter. An owner that
-- waits for a key leaves its line.
-- KEYS: for each key its lock, its line; optional: the hint of a single key, to take it.
-- ARGV: owner; with a hint also the owner for which the key is reserved if there was a hint (PROMOTED),
--       and for how many ms.
-- Returns how many keys the owner held, without those that were only reserved for it; with a hint
-- {that number, 1 if there was a hint}.
local owner, freed = ARGV[1], 0
for i = 1, #KEYS - 1, 2 do
  local lock, line = KEYS[i], KEYS[i + 1]
  local waiting = redis.call('EXISTS', line) == 1 and line_of_waiters()
  if not (waiting and waiting.step_back(lock, line, owner)) and redis.pcall('GET', lock) == owner then
    redis.call('DEL', lock)
    freed = freed + 1
    if waiting then
      waiting.keep_for_first(lock, line)
    end
  end
end
if #KEYS % 2 == 0 then
  return freed
end
local hint = redis.call('DEL', KEYS[#KEYS])
if hint == 1 and freed == 1 then
  redis.pcall('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) -- fails if the server has no memory
end
return {freed, hint}
