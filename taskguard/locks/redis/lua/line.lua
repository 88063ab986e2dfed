-- Who waits for a key, first come, first served, and who shares it. This stands before each script
-- that needs it, as one function, since functions are made anew each time: where nobody waits, and
-- nobody shares, it is not called.
--
-- The lock of a key that one owner has alone is that owner. Of a key that is shared it is a sorted
-- set: its owners, by when their leases end, in ms of the server's clock.
--
-- Beside a key's lock stand its line (owners, numbered as they came) and, for each nonce in it,
-- `:waits:` (it lives; its expiry is when it leaves the line; its value: while fewer than so many
-- hold the key the owner may come in, 1 to have it alone) and `:wake:` (an element, for BLPOP).
-- The lock of a key whose owner is still in the line is only kept for it, until it comes: whoever
-- releases has kept it for the first in the line, so that nobody comes in between. Who does not
-- come within GRACE_MS loses it to the next one, but not its place in the line. So is a share.

local function line_of_waiters()
  local GRACE_MS = 50       -- a live waiter comes in less, and one that was killed costs no more
  local ASK_MS = 1000       -- waiters ask again after so long
  local WAITS_MS = 3000
  local ON_TIME_MS = 1500   -- who has that much left is on time; others are passed over
  -- Among so many one asks again every 50 ms anyway, and sees who did not come.
  local MANY = 20

  local function beside(lock, what, owner)
    return lock .. what .. string.match(owner, '^[^/]*')
  end

  -- A server that is full takes nothing, and in a slot that is moving nothing may be touched that was
  -- not named. It is not known then who is first, or the waiter asks after a second.
  local function try(...)
    local reply = redis.pcall(...)
    local said = type(reply) == 'table' and reply.err
    if said and not string.find(said, 'OOM') and not string.find(said, 'non local key') then
      return redis.call(...) -- which raises it
    end
    return reply
  end

  -- One element at most, for nobody may come to fetch it.
  local function push(list, text, expiry_ms)
    try('DEL', list)
    try('LPUSH', list, text)
    try('PEXPIRE', list, expiry_ms)
  end

  -- The owner leaves the line; whether it was in it.
  local function leave(lock, line, owner)
    if redis.call('ZREM', line, owner) == 0 then
      return false
    end
    try('DEL', beside(lock, ':waits:', owner), beside(lock, ':wake:', owner))
    return true
  end

  -- The owner lives; whether it was known before.
  local function hear(lock, owner)
    return try('PEXPIRE', beside(lock, ':waits:', owner), WAITS_MS) == 1
  end

  -- The owner has a place in the line, and lives; it may come in while fewer than `limit` hold.
  local function join(lock, line, owner, limit)
    if not hear(lock, owner) or not redis.call('ZSCORE', line, owner) then
      local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
      try('ZADD', line, 'NX', (last or 0) + 1, owner)
      try('SET', beside(lock, ':waits:', owner), limit, 'PX', WAITS_MS)
    end
    redis.call('PEXPIRE', line, WAITS_MS)
  end

  local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
  end

  -- How many share a key, once those are gone whose leases have ended; nil if one has it alone.
  local function sharers(lock)
    local now = now_ms()
    while true do
      local first = redis.pcall('ZRANGE', lock, 0, 0, 'WITHSCORES')
      if first.err then
        return nil
      elseif not first[1] or tonumber(first[2]) > now then
        return redis.call('ZCARD', lock)
      end
      redis.call('ZREM', lock, first[1])
    end
  end

  -- Who has a share for longest; a share that is only kept ends before those that are held.
  local function longest(lock)
    local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
    return last[1], tonumber(last[2])
  end

  -- The owner has a share for so long from now on.
  local function share(lock, owner, ttl_ms)
    local now = now_ms()
    redis.call('ZADD', lock, now + ttl_ms, owner)
    local _, ends_ms = longest(lock)
    redis.call('PEXPIRE', lock, ends_ms - now)
  end

  -- Keeps a key for the first in the line who is on time, and wakes it, if it may come in beside the
  -- `held` who share the key; then also those behind it who may. Answers whom it called first.
  local function keep_for_first(lock, line, held)
    local place, first = 0, false
    held = held or 0
    while true do
      local who = redis.call('ZRANGE', line, place, place)[1]
      if not who then
        return first
      end
      local waits = beside(lock, ':waits:', who)
      local left_ms = try('PTTL', waits)
      if type(left_ms) ~= 'number' then
        return first
      elseif left_ms < 0 then
        leave(lock, line, who)
      elseif left_ms < ON_TIME_MS then
        place = place + 1
      else
        local limit = tonumber(redis.call('GET', waits))
        if held >= limit then
          return first -- and nobody behind it comes in before it
        elseif limit == 1 then
          redis.call('SET', lock, who, 'PX', GRACE_MS)
        else
          share(lock, who, GRACE_MS)
        end
        try('PEXPIRE', waits, ON_TIME_MS - 1) -- it is not called again before it has asked
        push(beside(lock, ':wake:', who), 'come', ASK_MS)
        local count = redis.call('ZCARD', line)
        if count > 1 and count < MANY then
          -- One of the others who is connected gets it, and looks whether the first one came.
          push(lock .. ':look', 'look', GRACE_MS)
        end
        first = first or who
        if limit == 1 then
          return first
        end
        held, place = held + 1, place + 1
      end
    end
  end

  -- The owner waits for this key no longer; what is kept for it goes to the next one, and those come
  -- in who share the key and were behind it. Whether it was in the line.
  local function step_back(lock, line, owner)
    local waited = leave(lock, line, owner)
    if waited and redis.pcall('GET', lock) == owner then
      redis.call('DEL', lock)
      keep_for_first(lock, line)
    elseif waited then
      local held = sharers(lock)
      if held then
        keep_for_first(lock, line, held)
      end
    end
    return waited
  end

  return {
    ASK_MS = ASK_MS,
    MANY = MANY,
    hear = hear,
    join = join,
    keep_for_first = keep_for_first,
    leave = leave,
    longest = longest,
    now_ms = now_ms,
    share = share,
    sharers = sharers,
    step_back = step_back,
  }
end

