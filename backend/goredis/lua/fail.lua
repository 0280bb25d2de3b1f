-- KEYS: value, lease, claim. ARGV: token, channel, key, failure, ttl of the back-off in ms or 0.
local there, mine = redis.call('MGET', KEYS[2], KEYS[3]), {}
if there[1] == ARGV[1] then mine[1] = KEYS[2] end
if there[2] == ARGV[1] then mine[#mine + 1] = KEYS[3] end
if #mine == 0 then return 0 end
redis.call('DEL', unpack(mine))
-- A full Redis may refuse the back-off; the failure is announced all the same. Another's lease stays.
if tonumber(ARGV[5]) > 0 and (there[1] == ARGV[1] or not there[1] or there[1] == '') then
  redis.pcall('SET', KEYS[2], '!' .. ARGV[4], 'PX', ARGV[5])
end
announce(ARGV[2], 'x', ARGV[1], '', ARGV[3], ARGV[4])
return 1
