-- KEYS: value, lease, claim.
-- ARGV 1: token of this fill. 2: channel. 3: key. 4: token of the record that this fill has seen.
-- ARGV 5: ttl of the lease in ms. 6: ttl of the claim in ms. 7: the driver.Mode.
-- ARGV 8: a tolerance in ms. A lease with more than ARGV[5] + ARGV[8] ms left counts as free.
-- Reply, by driver.AcquireState:
--   acquired: {0, seconds, microseconds of the server's clock}, and the failure of a note if there was one
--   changed:  {1, record}
--   held:     {2, token of the holder, its life in ms}; for a back-off the token is '!' and the failure
--   free:     {3, the failure of a note, or ''}
local force, look = ARGV[7] == '2', ARGV[7] == '3'
local there = redis.call('MGET', KEYS[1], KEYS[2], KEYS[3])
local record = there[1]
local holder, awaited, note = holder_of(there[2])
local mine = holder == ARGV[1] and not look
if record and record ~= '' and token_of(record) ~= ARGV[4] then
  if mine then
    redis.call('DEL', KEYS[2])
    announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '')
  end
  return {1, record}
end
local failed = holder and string.sub(holder, 1, 1) == '!'
if holder and not mine and not (failed and force) then
  local left = redis.call('PTTL', KEYS[2])
  local endless = left < 0 or left > ARGV[5] + ARGV[8] and not failed
  if not endless then
    if not failed and not awaited and type(redis.pcall('APPEND', KEYS[2], '+')) == 'table' then
      left = math.min(left, 100) -- a full Redis refused the '+', so the holder may not announce its result
    end
    return {2, holder, left}
  end
end
if look then return {3, note or ''} end
if not mine then put(KEYS[2], ARGV[1], ARGV[5]) end
local claimant, seconds, micros = claim_of(there[3])
if claimant ~= ARGV[1] then
  local now = redis.call('TIME')
  seconds, micros = now[1], now[2]
  put(KEYS[3], ARGV[1] .. '@' .. seconds .. '.' .. micros, ARGV[6])
end
return {0, seconds, micros, note}
