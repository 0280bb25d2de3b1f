-- KEYS: mark. ARGV: token, channel, tag, 'I' or 'E', ttl in ms.
local now = micros()
local invalidated, expired, left = mark_of(KEYS[1])
if not invalidated then invalidated, expired, left = now, 0, 0 end

-- later lets a moment stand that a clock which stepped back a little has not reached again. One that is further ahead is
-- from before the clock was set back, and would void for as long as it was set back by.
local function later(old)
  if old > now and old < now + 1000000 then return old end
  return now
end

local at
if ARGV[4] == 'I' then
  invalidated = later(invalidated)
  at = invalidated
else
  expired = later(expired)
  at = expired
end
-- A full Redis refuses a SET, unless the script has deleted something. And if it is refused all the same: a tag that is
-- not known voids, too.
redis.call('DEL', KEYS[1])
set_mark(KEYS[1], invalidated, expired, math.max(left, tonumber(ARGV[5])))
announce(ARGV[2], ARGV[4], ARGV[1], '', ARGV[3], string.format('%.0f', at))
return 1
