-- KEYS: value, lease, claim.
-- ARGV: token, ttl in ms.
-- Reply: 1 if lease and claim both belong to the token.
local there = redis.call('MGET', KEYS[2], KEYS[3])
if holder_of(there[1]) ~= ARGV[1] or claim_of(there[2]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[2], ARGV[2])
