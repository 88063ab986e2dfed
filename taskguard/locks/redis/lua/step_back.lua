-- Takes an owner out of a key's line; what is kept for it goes to the next one. What it holds stays.
-- KEYS: the key's lock, its line.   ARGV: owner.
-- Answers 1 if it was in the line.
return line_of_waiters().step_back(KEYS[1], KEYS[2], ARGV[1])
