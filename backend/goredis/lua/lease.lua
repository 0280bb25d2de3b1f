-- KEYS: lease, wait. ARGV: token, ttl in ms, '1' if a back-off counts as free, how much longer another's lease may live.
-- Answers {1} for taken, otherwise notes that somebody waits, and answers {0, what stands there, its life in ms}.
local there = redis.call('MGET', KEYS[1])[1]
if there and there ~= '' and there ~= ARGV[1] and not (ARGV[3] == '1' and string.sub(there, 1, 1) == '!') then
  local left = redis.call('PTTL', KEYS[1])
  local endless = left < 0 or left > ARGV[2] + ARGV[4] and string.sub(there, 1, 1) ~= '!'
  if not endless then
    redis.pcall('SET', KEYS[2], ARGV[1], 'PX', 2 * ARGV[2])
    return {0, there, left}
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1}
