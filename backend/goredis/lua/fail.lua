-- KEYS: value, lease, claim.
-- ARGV: token, channel, key, failure, ttl of the back-off in ms or 0.
local had, holder = free(KEYS[2], KEYS[3], ARGV[1])
if not had then return 0 end
-- A full Redis may refuse the back-off; the failure is announced nevertheless. The lease of another fill stays.
if tonumber(ARGV[5]) > 0 and (holder == ARGV[1] or not holder) then
  redis.pcall('SET', KEYS[2], '!' .. ARGV[4], 'PX', ARGV[5])
end
announce(ARGV[2], 'x', ARGV[1], '', ARGV[3], ARGV[4])
return 1
