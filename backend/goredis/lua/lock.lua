-- KEYS: lock, fence.
-- ARGV: token, ttl in ms, life of the fence in ms.
-- Reply: {1, fence}, or {0, remaining life of the holder's lock in ms}.
local holder = redis.call('MGET', KEYS[1])[1]
local own = holder == ARGV[1]
if holder and holder ~= '' and not own then
  local left = redis.call('PTTL', KEYS[1])
  if left >= 0 then return {0, left} end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local fence = tonumber(redis.call('MGET', KEYS[2])[1] or '') or 0
if not (fence >= 0 and fence < 9e15) then fence = 0 end -- foreign bytes count as no fence
if not own or fence == 0 then
  -- The fence is at least the time in microseconds, so it rises even if the counter was lost or has expired.
  fence = math.max(fence + 1, micros())
  redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[3])
end
return {1, string.format('%.0f', fence)}
