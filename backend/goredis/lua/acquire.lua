-- KEYS: value, lease, claim.
-- ARGV: token, channel, key, token of the record seen, ttl of the lease in ms, ttl of the claim in ms, '1' if a
-- back-off counts as free, how many ms longer than ours another lease may live.
-- Reply: a driver.AcquireState and its fields: {0, seconds, microseconds}, {1, record}, or {2, holder, life in ms}. For
-- a back-off, the holder is '!' and the failure.
local there = redis.call('MGET', KEYS[1], KEYS[2], KEYS[3])
local record = there[1]
local holder, awaited = holder_of(there[2])
local mine = holder == ARGV[1]
if record and record ~= '' and token_of(record) ~= ARGV[4] then
  if mine then
    redis.call('DEL', KEYS[2])
    announce(ARGV[2], 'r', ARGV[1], '', ARGV[3], '')
  end
  return {1, record}
end
local failed = holder and string.sub(holder, 1, 1) == '!'
if holder and not mine and not (failed and ARGV[7] == '1') then
  local left = redis.call('PTTL', KEYS[2])
  local endless = left < 0 or left > ARGV[5] + ARGV[8] and not failed
  if not endless then
    if not failed and not awaited and type(redis.pcall('APPEND', KEYS[2], '+')) == 'table' then
      left = math.min(left, 100) -- a full Redis refused it: the holder may end without an announcement
    end
    return {2, holder, left}
  end
end
if not mine then redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[5]) end
local claimant, seconds, micros = claim_of(there[3])
if claimant ~= ARGV[1] then
  local now = redis.call('TIME')
  seconds, micros = now[1], now[2]
  redis.call('SET', KEYS[3], ARGV[1] .. '@' .. seconds .. '.' .. micros, 'PX', ARGV[6])
end
return {0, seconds, micros}
