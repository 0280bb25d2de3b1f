-- This file precedes every script. The scripts read with MGET, because MGET returns nil for a key of a foreign type.
-- Such a key counts as absent, and a plain SET or DEL removes the key.

-- token_of returns the token of a record, or '' if the bytes are not a record. It does what driver.RecordToken does.
local function token_of(record)
  if #record < 16 or string.sub(record, 1, 3) ~= 'RF1' then return '' end
  local n = string.byte(record, 16)
  if #record < 16 + n then return '' end
  return string.sub(record, 17, 16 + n)
end

-- announce publishes an announcement in the format that announcement.go describes.
local function announce(channel, kind, token, replaced, key, rest)
  local head = 'RN1 ' .. kind .. ' ' .. #token .. ' ' .. #replaced .. ' ' .. #key .. ' '
  redis.call('PUBLISH', channel, head .. token .. replaced .. key .. rest)
end

-- micros returns the server's clock in microseconds. Lua's numbers hold such moments exactly. The scripts write a
-- moment with %.0f, because tostring would round the number.
local function micros()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- tag_state_of returns when a tag was invalidated, when the tag was expired, and the remaining life of the state in
-- ms. It returns nil if there is no state, if parseTagState of tag.go would not accept the state, or if the state has
-- no end.
local function tag_state_of(key)
  local there = redis.call('MGET', key)[1] or ''
  local invalidated, expired = string.match(there, '^(%d+) (%d+)$')
  if not invalidated then return nil end
  invalidated, expired = tonumber(invalidated), tonumber(expired)
  local exact = invalidated < 9e15 and expired < 9e15 and string.format('%.0f %.0f', invalidated, expired) == there
  local left = redis.call('PTTL', key)
  if not exact or left < 0 then return nil end
  return invalidated, expired, left
end

local function set_tag_state(key, invalidated, expired, life)
  redis.call('SET', key, string.format('%.0f %.0f', invalidated, expired), 'PX', string.format('%.0f', life))
end

-- put sets a lease or a claim. A full Redis refuses a SET, unless the script has deleted a key before. Without the DEL
-- and the second SET, a full Redis would have no refill lock, and every node would load every key.
local function put(key, text, ttl)
  local set = redis.pcall('SET', key, text, 'PX', ttl)
  if set.err then
    redis.call('DEL', key)
    redis.call('SET', key, text, 'PX', ttl)
  end
end

-- holder_of reads a lease. Its first result is the holder's token, or '!' and the failure of a back-off, or nil if
-- the lease is free. Its second result says whether a caller waits for the holder. In that case a '+' follows the
-- token in the lease. Its third result is the failure that is noted in the place of a free lease, or nil. A '?' stands
-- before that failure in the lease.
local function holder_of(lease)
  if not lease or lease == '' then return nil, false end
  local mark = string.sub(lease, 1, 1)
  if mark == '?' then return nil, false, string.sub(lease, 2) end
  if mark == '!' or string.sub(lease, -1) ~= '+' then return lease, false end
  local token = string.sub(lease, 1, -2)
  if token == '' then return nil, false end
  return token, true
end

-- claim_of splits a claim, 'token@seconds.microseconds'. It returns the claimant's token, the seconds and the
-- microseconds. The two numbers say when the claim was taken.
local function claim_of(claim)
  return string.match(claim or '', '^(.*)@(%d+)%.(%d+)$')
end

-- free deletes lease and claim, each if it belongs to the token. It returns whether it deleted at least one of the
-- two, and who held the lease before.
local function free(lease, claim, token)
  local there, mine = redis.call('MGET', lease, claim), {}
  local holder = holder_of(there[1])
  if holder == token then mine[1] = lease end
  if claim_of(there[2]) == token then mine[#mine + 1] = claim end
  if #mine > 0 then redis.call('DEL', unpack(mine)) end
  return #mine > 0, holder
end
