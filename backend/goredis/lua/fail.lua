-- KEYS: value, lease, claim.
-- ARGV: token, channel, key, failure, ttl in ms or 0, '!' for a back-off or '?' for a note, '1' to delete the value.
local had, holder = free(KEYS[2], KEYS[3], ARGV[1])
if not had then return 0 end
if ARGV[7] == '1' then
  redis.call('DEL', KEYS[1])
  announce(ARGV[2], 'i', ARGV[1], '', ARGV[3], '')
end
-- The lease of another fill stays. If a full Redis refuses the SET, the script still announces the failure.
if tonumber(ARGV[5]) > 0 and (holder == ARGV[1] or not holder) then
  redis.pcall('SET', KEYS[2], ARGV[6] .. ARGV[4], 'PX', ARGV[5])
end
announce(ARGV[2], 'x', ARGV[1], '', ARGV[3], ARGV[4])
return 1
