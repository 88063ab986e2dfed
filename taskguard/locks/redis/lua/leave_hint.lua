-- Leaves a hint for the next release of a key: a message waits for it in the ledger.
-- KEYS: the key's lock, its hint.   ARGV: the hint's expiry in ms.
-- Returns 1 if the key is free.
redis.call('SET', KEYS[2], '1', 'PX', ARGV[1])
return 1 - redis.call('EXISTS', KEYS[1])
