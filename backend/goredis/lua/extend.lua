-- KEYS: lock. ARGV: token, ttl in ms. Answers 1 if it is the token's.
if redis.call('MGET', KEYS[1])[1] ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
