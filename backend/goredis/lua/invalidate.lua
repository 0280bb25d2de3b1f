-- KEYS: value, lease, claim.
-- ARGV: token, channel, key.
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
announce(ARGV[2], 'i', ARGV[1], '', ARGV[3], '')
return 1
