-- KEYS: value, lease, claim. ARGV: token, channel, key, token of the replaced record, record, ttl in ms, size up to
-- which a record travels with its announcement, '1' to announce only if a caller waits, when the claim was taken (or
-- '' to compare only the token of the claim). Reply: a driver.PublishResult.
local there = redis.call('MGET', KEYS[2], KEYS[3])
local claimant, seconds, micros = claim_of(there[2])
if claimant ~= ARGV[1] or ARGV[9] ~= '' and ARGV[9] ~= seconds .. '.' .. micros then
  if free(KEYS[2], KEYS[3], ARGV[1]) then announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '') end
  -- The result is Stored, not Rejected, if an earlier try stored the record and the reply to that try was lost.
  local record = redis.call('MGET', KEYS[1])[1]
  return record and token_of(record) == ARGV[1] and 0 or 1
end
-- The script frees lease and claim before it stores. If a full Redis then refuses the SET, no lease without a holder
-- stays, and the waiters go on.
redis.call('DEL', KEYS[2], KEYS[3])
local set = redis.pcall('SET', KEYS[1], ARGV[5], 'PX', ARGV[6])
if ARGV[8] ~= '1' or there[1] ~= ARGV[1] or set.err then -- a caller waits, or may have waited before the lease was lost
  announce(ARGV[2], 'f', ARGV[1], ARGV[4], ARGV[3], #ARGV[5] <= tonumber(ARGV[7]) and ARGV[5] or '')
end
return set.err and 2 or 0
