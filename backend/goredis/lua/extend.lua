-- KEYS: lock.
-- ARGV: token, ttl in ms.
-- Reply: 1 if the lock belongs to the token.
if redis.call('MGET', KEYS[1])[1] ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
