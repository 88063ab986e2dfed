-- Removes an owner from a key's line. The next waiter gets its reservation. A lock that it holds stays.
-- KEYS: the key's lock, its line.   ARGV: owner.
-- Returns 1 if it was in the line.
return line_of_waiters().step_back(KEYS[1], KEYS[2], ARGV[1])
