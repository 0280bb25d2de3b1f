-- This file precedes every script. The scripts read with MGET, which also answers nil for a key of a foreign type. Such
-- a key counts as absent, and a plain SET or DEL removes it.

-- token_of does what driver.RecordToken does.
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
-- moment with %.0f, because tostring would round it.
local function micros()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- tag_state_of reads the state of a tag: when it was invalidated, when it was expired, and its life in ms. It returns
-- nil if there is no state, if parseTagState of tag.go would not accept the state, or if the state has no end.
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

-- holder_of reads a lease. It returns the holder's token, or '!' and the failure of a back-off, or nil for none. It
-- also returns whether a caller waits for the holder: then a '+' follows the token.
local function holder_of(lease)
  if not lease or lease == '' then return nil, false end
  if string.sub(lease, 1, 1) == '!' or string.sub(lease, -1) ~= '+' then return lease, false end
  local token = string.sub(lease, 1, -2)
  if token == '' then return nil, false end
  return token, true
end

-- claim_of reads a claim, 'token@seconds.microseconds': the claimant's token, and when the claim was taken.
local function claim_of(claim)
  return string.match(claim or '', '^(.*)@(%d+)%.(%d+)$')
end

-- free deletes lease and claim, each if it belongs to the token. It returns whether at least one of the two did, and
-- the holder of the lease.
local function free(lease, claim, token)
  local there, mine = redis.call('MGET', lease, claim), {}
  local holder = holder_of(there[1])
  if holder == token then mine[1] = lease end
  if claim_of(there[2]) == token then mine[#mine + 1] = claim end
  if #mine > 0 then redis.call('DEL', unpack(mine)) end
  return #mine > 0, holder
end
