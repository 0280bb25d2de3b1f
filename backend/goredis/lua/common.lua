-- Stands before every script. The scripts read with MGET, which answers nil for a key of a foreign type, too: such a key
-- counts as absent, and a plain SET or DEL removes it.

-- token_of is refill.RecordToken.
local function token_of(record)
  if #record < 16 or string.sub(record, 1, 3) ~= 'RF1' then return '' end
  local n = string.byte(record, 16)
  if #record < 16 + n then return '' end
  return string.sub(record, 17, 16 + n)
end

-- announce publishes a note in the format that note.go describes.
local function announce(channel, kind, token, replaced, key, rest)
  local head = 'RN1 ' .. kind .. ' ' .. #token .. ' ' .. #replaced .. ' ' .. #key .. ' '
  redis.call('PUBLISH', channel, head .. token .. replaced .. key .. rest)
end

-- free deletes lease and claim, each if it is the token's. Answers whether one was, and what stood in the lease.
local function free(lease, claim, token)
  local there, mine = redis.call('MGET', lease, claim), {}
  if there[1] == token then mine[1] = lease end
  if there[2] == token then mine[#mine + 1] = claim end
  if #mine > 0 then redis.call('DEL', unpack(mine)) end
  return #mine > 0, there[1]
end
