-- Renews many leases, each only if its owner still holds all of its keys, or its share of the key.
-- KEYS: the locks of all leases, one after the other.
-- ARGV: for each lease its owner, its lease in ms, the number of its keys.
-- Returns one letter for each lease: R: renewed, G: gone (a key has no owner), T: taken by another.
local answers, first = {}, 1

-- For a shared key, returns the owner if it has a share, otherwise ''; in how many ms the last share
-- ends after a renewal; and the new end of the owner's share.
local function share_of(lock, owner, ttl_ms)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local ends_ms = tonumber(redis.call('ZSCORE', lock, owner) or 0)
  local last_ms = tonumber(redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2])
  if ends_ms <= now then
    return '', 0
  end
  return owner, math.max(now + ttl_ms, last_ms) - now, now + ttl_ms
end

for lease = 1, #ARGV, 3 do
  local owner, last, answer = ARGV[lease], first + ARGV[lease + 2] - 1, 'R'
  local left_ms, ends_ms = ARGV[lease + 1], nil
  for i = first, last do
    local value = redis.pcall('GET', KEYS[i])
    if value ~= owner then
      if type(value) == 'table' then
        value, left_ms, ends_ms = share_of(KEYS[i], owner, tonumber(left_ms))
      end
      if value and value ~= owner then
        answer = 'T'
      elseif not value and answer == 'R' then
        answer = 'G'
      end
    end
  end
  if answer == 'R' then
    for i = first, last do
      if ends_ms then
        redis.call('ZADD', KEYS[i], ends_ms, owner)
      end
      redis.call('PEXPIRE', KEYS[i], left_ms)
    end
  end
  answers[#answers + 1] = answer
  first = last + 1
end
return table.concat(answers)
