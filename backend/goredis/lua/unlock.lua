-- KEYS: lock.
-- ARGV: token, channel, key.
-- Reply: 1 if the lock belonged to the token.
if redis.call('MGET', KEYS[1])[1] ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
announce(ARGV[2], 'u', ARGV[1], '', ARGV[3], '')
return 1
