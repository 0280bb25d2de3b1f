-- KEYS: value, lease, claim. ARGV: token, channel, key. The script changes the value in place, as driver.ExpireRecord
-- does.
local record = redis.call('MGET', KEYS[1])[1]
redis.call('DEL', KEYS[2], KEYS[3])
-- 62 bytes is the shortest record.
if record and #record >= 62 and string.sub(record, 1, 3) == 'RF1' then
  if string.sub(record, 4, 11) == string.rep('\0', 8) then
    local now, stamp = micros(), ''
    for _ = 1, 8 do
      local low = now % 256
      stamp = string.char(low) .. stamp
      now = (now - low) / 256
    end
    -- SETRANGE keeps the time to live. If Redis refuses SETRANGE, the script deletes the record.
    local set = redis.pcall('SETRANGE', KEYS[1], 3, stamp)
    if type(set) == 'table' and set.err then redis.call('DEL', KEYS[1]) end
  end
else
  redis.call('DEL', KEYS[1])
end
announce(ARGV[2], 'e', ARGV[1], '', ARGV[3], '')
return 1
