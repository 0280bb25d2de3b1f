-- KEYS: value, lease, claim. ARGV: token, channel, key, failure, ttl of the back-off in ms or 0.
local there = redis.call('MGET', KEYS[2], KEYS[3])
if there[1] ~= ARGV[1] and there[2] ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
-- A full Redis may refuse the back-off; the failure is announced all the same.
if tonumber(ARGV[5]) > 0 then redis.pcall('SET', KEYS[2], '!' .. ARGV[4], 'PX', ARGV[5]) end
announce(ARGV[2], 'x', ARGV[1], '', ARGV[3], ARGV[4])
return 1
