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
