-- Reads the holders of a key. Changes nothing.
-- KEYS: the key's lock, its fence.
-- Returns {the last token, 1 if the key is shared, then for each holder: owner, remaining ms}.
local lock = KEYS[1]
local fence = string.format('%.0f', tonumber(redis.call('GET', KEYS[2]) or 0) or 0)
local value = redis.pcall('GET', lock)
if type(value) ~= 'table' then -- one owner, or none
  return value and {fence, 0, value, redis.call('PTTL', lock)} or {fence, 0}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answer = {fence, 1}
local shares = redis.call('ZRANGE', lock, 0, -1, 'WITHSCORES')
for i = 1, #shares, 2 do
  local left_ms = tonumber(shares[i + 1]) - now
  if left_ms > 0 then
    answer[#answer + 1] = shares[i]
    answer[#answer + 1] = left_ms
  end
end
return answer
