"""The Lua scripts that make queue operations atomic. KEYS and ARGV are listed above each; GROUP is always ARGV[1].

Every script may run twice for one call (the reply of the first run can be lost with the connection), so each finds out
from the data whether its work is done already.
"""

from __future__ import annotations

from typing import Final

_OWNER: Final = """
local function owner(queue, group, entry)
  local p = redis.call('XPENDING', queue, group, entry, entry, 1)
  if p[1] then return p[1][2] end
  return false
end
"""

_LEAST: Final = """
-- The first of the queues KEYS[from] and on with the least load (prism.policy.routing.queue_load), and its length.
local function least(from, running, weighs)
  if from == #KEYS then return KEYS[from], redis.call('XLEN', KEYS[from]) end
  local best, best_load, best_length
  for i = from, #KEYS do
    local length = redis.call('XLEN', KEYS[i])
    local runs = tonumber(redis.call('HGET', running, KEYS[i]) or length)
    local load = length + weighs * math.max(0, length - runs)
    if not best or load < best_load then best, best_load, best_length = KEYS[i], load, length end
  end
  return best, best_length
end
"""

ADD: Final = (
    _LEAST
    + """
-- KEYS requests, running, queue...; ARGV group, request id, data, limit (-1: none), what one that waits weighs.
-- Returns {added or known, length, queue}.
local at = redis.call('HGET', KEYS[1], ARGV[2])
if at then
  local known = string.match(at, '^(%S+) ')
  return {1, redis.call('XLEN', known), known}
end
local queue, length = least(3, KEYS[2], tonumber(ARGV[5]))
local limit = tonumber(ARGV[4])
if limit >= 0 and length >= limit then return {0, length, queue} end
local entry = redis.call('XADD', queue, '*', 'i', ARGV[2], 'd', ARGV[3])
redis.call('HSET', KEYS[1], ARGV[2], queue .. ' ' .. entry)
return {1, length + 1, queue}
"""
)

TAKE_OVER: Final = """
-- KEYS queue; ARGV group, consumer, idle in ms, count. Returns {{entry, fields, deliveries}...}.
local taken, want = {}, tonumber(ARGV[4])
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #info, 2 do c[info[i]] = info[i + 1] end
  local from = '-'
  while c.name ~= ARGV[2] and c.pending > 0 and #taken < want do
    local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], from, '+', want - #taken, c.name)
    for _, p in ipairs(page) do
      local got = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, p[1], 'RETRYCOUNT', p[4] + 1)
      if got[1] then taken[#taken + 1] = {got[1][1], got[1][2], p[4] + 1} end
      from = '(' .. p[1]
    end
    if #page == 0 then break end
  end
  if c.name ~= ARGV[2] and c.pending == 0 and c.idle > 3600000 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c.name)
  end
end
return taken
"""

BEAT: Final = """
-- KEYS queue; ARGV group, consumer. Returns how many entries were beaten.
local from, total = '-', 0
while true do
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], from, '+', 500, ARGV[2])
  if #page == 0 then return total end
  local ids = {}
  for i, p in ipairs(page) do ids[i] = p[1] end
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
  total = total + #page
  from = '(' .. page[#page][1]
end
"""

DONE: Final = (
    _OWNER
    + """
-- KEYS queue, requests; ARGV group, consumer, entry, request id. Returns 1 done or gone already, 0 owned by another.
local who = owner(KEYS[1], ARGV[1], ARGV[3])
if who and who ~= ARGV[2] then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
if redis.call('HGET', KEYS[2], ARGV[4]) == KEYS[1] .. ' ' .. ARGV[3] then redis.call('HDEL', KEYS[2], ARGV[4]) end
return 1
"""
)

MOVE: Final = (
    _OWNER
    + _LEAST
    + """
-- KEYS queue, requests, running, target...; ARGV group, consumer, entry, request id, data, what one that waits weighs.
-- Returns 1 it stands in a target, 0 not ours.
local at = redis.call('HGET', KEYS[2], ARGV[4])
if at ~= KEYS[1] .. ' ' .. ARGV[3] then
  for i = 4, #KEYS do
    if at and string.sub(at, 1, #KEYS[i] + 1) == KEYS[i] .. ' ' then return 1 end
  end
  return 0
end
if owner(KEYS[1], ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
local target = least(4, KEYS[3], tonumber(ARGV[6]))
local entry = redis.call('XADD', target, '*', 'i', ARGV[4], 'd', ARGV[5])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[4], target .. ' ' .. entry)
return 1
"""
)

FORGET: Final = """
-- KEYS queue, running; ARGV group. Returns 1, or 0 when entries stand in it.
if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], KEYS[1])
return 1
"""

WITHDRAW: Final = (
    _OWNER
    + """
-- KEYS requests; ARGV group, request id. Returns {removed, queue, owner}.
local at = redis.call('HGET', KEYS[1], ARGV[2])
if not at then return {0, '', ''} end
local queue, entry = string.match(at, '^(%S+) (%S+)$')
local ok, who = pcall(owner, queue, ARGV[1], entry)
if ok and who then return {0, queue, who} end
redis.call('XDEL', queue, entry)
redis.call('HDEL', KEYS[1], ARGV[2])
return {1, queue, ''}
"""
)

POSITION: Final = """
-- KEYS requests; ARGV group, request id, most. Returns entries before it, up to most, or -1.
local at = redis.call('HGET', KEYS[1], ARGV[2])
if not at then return -1 end
local queue, entry = string.match(at, '^(%S+) (%S+)$')
return #redis.call('XRANGE', queue, '-', '(' .. entry, 'COUNT', ARGV[3])
"""

SET_PLACEMENT: Final = """
-- KEYS placement, controller; ARGV group, fence, model, json (empty: none), channel.
-- Returns 1, or 0 when the lease is lost.
local holder = redis.call('GET', KEYS[2])
if not holder or cjson.decode(holder)['fence'] ~= tonumber(ARGV[2]) then return 0 end
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], ARGV[3]) else redis.call('HSET', KEYS[1], ARGV[3], ARGV[4]) end
redis.call('PUBLISH', ARGV[5], ARGV[3])
return 1
"""

ACQUIRE: Final = """
-- KEYS controller, fence counter; ARGV group, id, mailbox, ttl in ms. Returns the fence, or 0 while another holds it.
local holder = redis.call('GET', KEYS[1])
local fence = nil
if holder then
  local record = cjson.decode(holder)
  if record['id'] ~= ARGV[2] then return 0 end
  fence = record['fence']
else
  fence = redis.call('INCR', KEYS[2])
end
redis.call('SET', KEYS[1], cjson.encode({id = ARGV[2], mailbox = ARGV[3], fence = fence}), 'PX', ARGV[4])
return fence
"""

RENEW: Final = """
-- KEYS controller; ARGV group, fence, ttl in ms (0: release). Returns 1, or 0 when it is not ours.
local holder = redis.call('GET', KEYS[1])
if not holder or cjson.decode(holder)['fence'] ~= tonumber(ARGV[2]) then return 0 end
if ARGV[3] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
"""

RATE: Final = """
-- KEYS bucket; ARGV group, amount, per minute, now in s. Returns {allowed, level as text}.
local amount, limit, now = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local old = redis.call('HMGET', KEYS[1], 'level', 'at')
local level = limit
if old[1] then level = math.min(limit, tonumber(old[1]) + math.max(0, now - tonumber(old[2])) * limit / 60) end
local allowed = 1
if amount > 0 and level < amount then allowed = 0 else level = math.min(limit, level - amount) end
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', ARGV[4])
redis.call('EXPIRE', KEYS[1], 120)
return {allowed, tostring(level)}
"""
