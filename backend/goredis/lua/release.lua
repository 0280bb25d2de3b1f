-- KEYS: value, lease, claim. ARGV: token, channel, key.
local there, mine = redis.call('MGET', KEYS[2], KEYS[3]), {}
if there[1] == ARGV[1] then mine[1] = KEYS[2] end
if there[2] == ARGV[1] then mine[#mine + 1] = KEYS[3] end
if #mine == 0 then return 0 end
redis.call('DEL', unpack(mine))
announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '')
return 1
