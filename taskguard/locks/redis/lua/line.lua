-- Who waits for a key, first come, first served. This stands before each script that needs it, as
-- one function, since functions are made anew each time: where nobody waits it is not called.
--
-- Beside a key's lock stand its line (owners, numbered as they came) and, for each nonce in it,
-- `:waits:` (it lives; its expiry is when it leaves the line) and `:wake:` (an element, for BLPOP).
-- The lock of a key whose owner is still in the line is only kept for it, until it comes: whoever
-- releases has kept it for the first in the line, so that nobody comes in between. Who does not
-- come within GRACE_MS loses it to the next one, but not its place in the line.

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

  -- The owner has a place in the line, and lives.
  local function join(lock, line, owner)
    if not hear(lock, owner) or not redis.call('ZSCORE', line, owner) then
      local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
      try('ZADD', line, 'NX', (last or 0) + 1, owner)
      try('SET', beside(lock, ':waits:', owner), '1', 'PX', WAITS_MS)
    end
    redis.call('PEXPIRE', line, WAITS_MS)
  end

  -- Keeps a key that is free for the first in the line who is on time, and wakes it; answers whom.
  local function keep_for_first(lock, line)
    local place = 0
    while true do
      local who = redis.call('ZRANGE', line, place, place)[1]
      if not who then
        return false
      end
      local waits = beside(lock, ':waits:', who)
      local left_ms = try('PTTL', waits)
      if type(left_ms) ~= 'number' then
        return false
      elseif left_ms < 0 then
        leave(lock, line, who)
      elseif left_ms < ON_TIME_MS then
        place = place + 1
      else
        redis.call('SET', lock, who, 'PX', GRACE_MS)
        try('PEXPIRE', waits, ON_TIME_MS - 1) -- it is not called again before it has asked
        push(beside(lock, ':wake:', who), 'come', ASK_MS)
        local count = redis.call('ZCARD', line)
        if count > 1 and count < MANY then
          -- One of the others who is connected gets it, and looks whether the first one came.
          push(lock .. ':look', 'look', GRACE_MS)
        end
        return who
      end
    end
  end

  -- The owner waits for this key no longer; what is kept for it goes to the next one. Whether it
  -- was in the line.
  local function step_back(lock, line, owner)
    local waited = leave(lock, line, owner)
    if waited and redis.call('GET', lock) == owner then
      redis.call('DEL', lock)
      keep_for_first(lock, line)
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
    step_back = step_back,
  }
end

