-- KEYS: tag state.
-- ARGV: token, channel, tag, 'I' to invalidate or 'E' to expire, ttl in ms.
local now = micros()
local invalidated, expired, left = tag_state_of(KEYS[1])
if not invalidated then invalidated, expired, left = now, 0, 0 end

-- later returns the moment to write in place of old. If old is less than a second ahead of now, the clock has made a
-- small step back, and later returns old. If old is further ahead, the clock was set back, and later returns now. If
-- later returned old then, new values would be invalid until the clock reached old again.
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
-- The script deletes the state first, because a full Redis accepts a SET only after the script has deleted something.
-- If Redis still refuses the SET, the tag becomes unknown, and values with an unknown tag are invalid as well.
redis.call('DEL', KEYS[1])
set_tag_state(KEYS[1], invalidated, expired, math.max(left, tonumber(ARGV[5])))
announce(ARGV[2], ARGV[4], ARGV[1], '', ARGV[3], string.format('%.0f', at))
return 1
