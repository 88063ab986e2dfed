-- Leaves a hint for whoever releases a key next: somebody waits for it in the ledger.
-- KEYS: the key's lock, its hint.   ARGV: for how long, in ms.
-- Answers 1 if the key is free.
redis.call('SET', KEYS[2], '1', 'PX', ARGV[1])
return 1 - redis.call('EXISTS', KEYS[1])
