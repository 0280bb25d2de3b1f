-- KEYS: value, lease, claim.
-- ARGV: token, channel, key.
if not free(KEYS[2], KEYS[3], ARGV[1]) then return 0 end
announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '')
return 1
