-- KEYS: tag state.
-- ARGV: how long ago an unknown tag counts as invalidated, in microseconds; ttl in ms.
local invalidated, _, left = tag_state_of(KEYS[1])
local life = tonumber(ARGV[2])
if not invalidated then
  set_tag_state(KEYS[1], math.max(0, micros() - ARGV[1]), 0, life)
elseif left < life then
  redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- a full Redis accepts PEXPIRE, but not SET
end
return 1
