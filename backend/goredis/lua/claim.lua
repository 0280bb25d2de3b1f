-- KEYS: value, lease, claim. ARGV: token, channel, key, token of the record seen, ttl in ms.
-- Answers {state, seconds, microseconds[, record]}; the state is a refill.ClaimState.
local there = redis.call('MGET', KEYS[1], KEYS[2])
local record, now = there[1], redis.call('TIME')
if there[2] ~= ARGV[1] then return {2, now[1], now[2]} end
if record and record ~= '' and token_of(record) ~= ARGV[4] then
  redis.call('DEL', KEYS[2])
  announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '')
  return {1, now[1], now[2], record}
end
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[5])
return {0, now[1], now[2]}
