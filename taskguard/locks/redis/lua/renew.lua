-- Renews many leases; each only where all of its keys are still its owner's.
-- KEYS: the locks of all leases, one after the other.
-- ARGV: for each lease its owner, its lease in ms, the number of its keys.
-- Answers one letter for each lease: R renewed, G gone (a key has no owner), T taken by another.
local answers, first = {}, 1
for lease = 1, #ARGV, 3 do
  local owner, last, answer = ARGV[lease], first + ARGV[lease + 2] - 1, 'R'
  for i = first, last do
    local value = redis.call('GET', KEYS[i])
    if value and value ~= owner then
      answer = 'T'
    elseif not value and answer == 'R' then
      answer = 'G'
    end
  end
  if answer == 'R' then
    for i = first, last do
      redis.call('PEXPIRE', KEYS[i], ARGV[lease + 1])
    end
  end
  answers[#answers + 1] = answer
  first = last + 1
end
return table.concat(answers)
