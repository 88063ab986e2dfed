-- The waiters of a key, first come, first served, and the owners that share it. taskguard puts this
-- file before each script that needs it. It is one function, because Lua creates functions anew in
-- each run: a script calls it only if there are waiters or shares.
--
-- The lock of a key with one owner is a text: the owner. The lock of a shared key is a sorted set:
-- its owners, by the ends of their leases, in ms of the server's clock.
--
-- A key with waiters has more entries: its line (owners, numbered as they came) and, for each nonce
-- in the line,
--   `:waits:`  the waiter is alive. It leaves the line when this entry expires. The value is its limit:
--              it may take the key while fewer owners than that hold it; 1: it needs the key alone.
--   `:wake:`   one element for BLPOP.
--
-- If the owner of a lock is still in the line, the lock is only reserved for it. A release reserves
-- the lock for the first waiter, so that newcomers cannot take it. A waiter that does not come within
-- GRACE_MS loses the reservation to the next waiter, and keeps its position. The same is true of shares.

local function line_of_waiters()
  local GRACE_MS = 50       -- a live waiter needs less; a killed one costs no more
  local ASK_MS = 1000       -- a waiter tries again after this time
  local WAITS_MS = 3000
  local ON_TIME_MS = 1500   -- a waiter whose entry has less time left is late, and is passed over
  -- With this many waiters, one of them tries every 50 ms anyway, and finds a lost reservation.
  local MANY = 20

  local function beside(lock, what, owner)
    return lock .. what .. string.match(owner, '^[^/]*')
  end

  -- Ignores two errors: a server without memory refuses writes, and a slot that is being moved refuses
  -- entries that are not in KEYS. Then the first waiter is unknown, or a waiter tries after a second.
  local function try(...)
    local reply = redis.pcall(...)
    local said = type(reply) == 'table' and reply.err
    if said and not string.find(said, 'OOM') and not string.find(said, 'non local key') then
      return redis.call(...) -- raises the error
    end
    return reply
  end

  -- Keeps one element at most, because a waiter may never fetch it.
  local function push(list, text, expiry_ms)
    try('DEL', list)
    try('LPUSH', list, text)
    try('PEXPIRE', list, expiry_ms)
  end

  -- Removes the owner from the line. Returns whether it was in the line.
  local function leave(lock, line, owner)
    if redis.call('ZREM', line, owner) == 0 then
      return false
    end
    try('DEL', beside(lock, ':waits:', owner), beside(lock, ':wake:', owner))
    return true
  end

  -- Records that the owner is alive. Returns whether it was known before.
  local function hear(lock, owner)
    return try('PEXPIRE', beside(lock, ':waits:', owner), WAITS_MS) == 1
  end

  -- Gives the owner a position in the line, and records that it is alive. It may take the key while
  -- fewer than `limit` owners hold it.
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

  -- Removes shares whose leases have ended. Returns how many remain; nil if the key is not shared.
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

  -- Returns the owner whose share ends last. A reserved share ends before shares that are held.
  local function longest(lock)
    local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
    return last[1], tonumber(last[2])
  end

  -- Gives the owner a share that ends after `ttl_ms`.
  local function share(lock, owner, ttl_ms)
    local now = now_ms()
    redis.call('ZADD', lock, now + ttl_ms, owner)
    local _, ends_ms = longest(lock)
    redis.call('PEXPIRE', lock, ends_ms - now)
  end

  -- Reserves a key for the first waiter that is on time, and wakes it, if its limit is above `held`,
  -- the number of shares. If that waiter takes a share, continues with the next one. Returns the first
  -- owner with a reservation.
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
          return first -- later waiters do not overtake it
        elseif limit == 1 then
          redis.call('SET', lock, who, 'PX', GRACE_MS)
        else
          share(lock, who, GRACE_MS)
        end
        try('PEXPIRE', waits, ON_TIME_MS - 1) -- no second reservation before it has tried again
        push(beside(lock, ':wake:', who), 'come', ASK_MS)
        local count = redis.call('ZCARD', line)
        if count > 1 and count < MANY then
          -- One of the other waiters gets this element, and checks whether the first one came.
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

  -- Removes the owner from the line. The next waiter gets its reservation, and waiters behind it may
  -- get shares. Returns whether it was in the line.
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

