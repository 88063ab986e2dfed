-- Frees the keys that are still the owner's, each for the first who waits; others' stay untouched.
-- An owner that waits for a key leaves its line.
-- KEYS: for each key its lock, its line; then, where it is to be taken, the hint of the one key.
-- ARGV: owner; with a hint whoever is called to the key, and for how long it is kept for that one if
-- there was a hint, in ms.
-- Answers how many it held, but for those that were only kept for it; with a hint {that, 1 if there
-- was one}.
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
  redis.pcall('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) -- unless the server is full
end
return {freed, hint}
