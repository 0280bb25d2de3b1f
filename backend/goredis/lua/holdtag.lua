-- KEYS: mark. ARGV: how far back a tag that is not known counts as invalidated, in microseconds; ttl in ms.
local invalidated, _, left = mark_of(KEYS[1])
local life = tonumber(ARGV[2])
if not invalidated then
  set_mark(KEYS[1], math.max(0, micros() - ARGV[1]), 0, life)
elseif left < life then
  redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- unlike SET, a full Redis takes it
end
return 1
