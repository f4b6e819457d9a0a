"""Limits of keys in Redis: one account per key, changed by Lua scripts, so that every decision is atomic.

The scripts implement ``accounting/quotas.py``. An account is ``{windows, held}``: for each limit the steps
``{number, amount}``, and for each request in flight ``{holder, number, at, tokens}``. Times are Redis's own.
"""

import math
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from accounting.keys import Budget, KeyLimits
from accounting.quotas import (
    BUDGETS,
    LIMITS,
    MAX_HOLD_S,
    RETRY_HELD_S,
    Excess,
    Figures,
    HoldId,
    Limit,
    QuotaRequest,
    QuotaVerdict,
    Settlement,
    amounts,
    kinds_of,
)
from gateway.state.limits import KEPT_S, LEASE_S
from gateway.state.redis_client import ask as send
from gateway.state.redis_client import prefix

_NOBODY = HoldId("", 0)
_Scripts = dict[tuple[Limit, ...], Callable[..., object]]


def _windows(kinds: Sequence[Limit]) -> str:
    steps, periods = ([getattr(one, name) for one in kinds] for name in ("step_s", "period_s"))
    return f"local STEP = {{{str(steps)[1:-1]}}}\nlocal PERIOD = {{{str(periods)[1:-1]}}}\n"


_RULES = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function leaves(i, number) return (number + 1) * STEP[i] + PERIOD[i] end
local function load(key)
  local raw = redis.call('GET', key)
  local account = raw and cmsgpack.unpack(raw) or {{{{{{}}, {{}}, {{}}}}, {{}}}}
  for i, steps in ipairs(account[1]) do
    local latest = (STEP[i] or 0) > 0 and math.floor(now / STEP[i]) or math.huge
    for n = #steps, 1, -1 do
      if steps[n][1] <= latest then break end
      steps[n][1] = latest  -- the clock was set back
    end
  end
  return account
end
local function save(key, account)
  redis.call('SET', key, cmsgpack.pack(account), 'EX', {KEPT_S})
end
"""

_TAKE = (
    _RULES
    + f"""
local holder, number, requests, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if tokens > 0 then
  local lease = redis.call('ZSCORE', KEYS[2], holder)
  if ARGV[8] == '0' and (not lease or tonumber(lease) < now) then return {{-1}} end
  redis.call('ZADD', KEYS[2], string.format('%.3f', now + {LEASE_S}), holder)
end
local account = load(KEYS[1])
local alive, held = {{}}, {{}}
for _, one in ipairs(account[2]) do
  if alive[one[1]] == nil then
    local lease = redis.call('ZSCORE', KEYS[2], one[1])
    alive[one[1]] = lease and tonumber(lease) >= now or false
    if tokens > 0 and lease and tonumber(lease) > now + {LEASE_S} + 1 then  -- the clock was set back
      redis.call('ZADD', KEYS[2], string.format('%.3f', now + {LEASE_S}), one[1])
    end
  end
  if alive[one[1]] and one[3] + {MAX_HOLD_S} > now then held[#held + 1] = one end
end
account[2] = held
local used, settled, last = {{0, 0, 0}}, {{0, 0, 0}}, {{-1, -1, -1}}
local function counts(i, number, amount)
  if amount == 0 or leaves(i, number) <= now then return false end
  used[i] = used[i] + amount
  if number > last[i] then last[i] = number end
  return true
end
for i = 1, 3 do
  local steps = {{}}
  for _, step in ipairs(account[1][i]) do
    if counts(i, step[1], step[2]) then steps[#steps + 1] = step end
  end
  account[1][i], settled[i] = steps, used[i]
  if i > 1 then
    for _, one in ipairs(held) do counts(i, math.floor(one[3] / STEP[i]), one[4]) end
  end
end
-- Which limit refuses the request; of several, the one that does so for longest.
local worst, longest = 0, -1
for i = 1, 3 do
  local limit = tonumber(ARGV[4 + i])
  local asked = i == 1 and requests or tokens
  if limit >= 0 and asked > 0 and used[i] + asked > limit then
    local wait = math.huge
    if asked <= limit then
      local over = settled[i] + asked - limit
      wait = {RETRY_HELD_S}
      for _, step in ipairs(account[1][i]) do
        if over <= 0 then break end
        over = over - step[2]
        wait = leaves(i, step[1]) - now
      end
    end
    if wait > longest then worst, longest = i, wait end
  end
end
if worst == 0 and (requests > 0 or tokens > 0) then
  local at = math.floor(now)
  if requests > 0 and tonumber(ARGV[5]) >= 0 then
    local own, step = account[1][1], math.floor(at / STEP[1])
    if #own > 0 and own[#own][1] == step then own[#own][2] = own[#own][2] + requests
    else own[#own + 1] = {{step, requests}} end
    used[1], last[1] = used[1] + requests, step
  end
  if tokens > 0 then
    held[#held + 1] = {{holder, number, at, tokens}}
    for i = 2, 3 do
      used[i], last[i] = used[i] + tokens, math.max(last[i], math.floor(at / STEP[i]))
    end
  end
  save(KEYS[1], account)
end
local answer = {{worst, math.floor(now), longest == math.huge and -1 or math.ceil(longest * 1000)}}
for i = 1, 3 do
  answer[#answer + 1] = math.max(0, tonumber(ARGV[4 + i]) - used[i])
  answer[#answer + 1] = last[i] < 0 and 0 or math.ceil((leaves(i, last[i]) - now) * 1000)
end
return answer
"""
)

# One key and one group of eight arguments per settlement, after the sender's key and the number of its batch.
# Steps and periods are those of the two windows of tokens, 0 for one without a limit.
_SETTLE = (
    "local STEP, PERIOD = {}, {}"
    + _RULES
    + f"""
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', {KEPT_S})
"""
    + """
for n = 2, #KEYS do
  local key, from = KEYS[n], (n - 2) * 8 + 1
  STEP[2], PERIOD[2] = tonumber(ARGV[from + 5]), tonumber(ARGV[from + 6])
  STEP[3], PERIOD[3] = tonumber(ARGV[from + 7]), tonumber(ARGV[from + 8])
  local holder, number, at = ARGV[from + 1], tonumber(ARGV[from + 2]), tonumber(ARGV[from + 3])
  local used = tonumber(ARGV[from + 4])
  local account, held, found = load(key), {}, nil
  for _, one in ipairs(account[2]) do
    if one[1] == holder and one[2] == number then found = one else held[#held + 1] = one end
  end
  account[2] = held
  at = found and found[3] or at >= 0 and at or math.floor(now)
  for i = 2, 3 do
    local step = STEP[i] > 0 and math.floor(at / STEP[i])
    if used > 0 and step and leaves(i, step) > now then
      local own, place = account[1][i], 1
      while own[place] and own[place][1] < step do place = place + 1 end
      if own[place] and own[place][1] == step then own[place][2] = own[place][2] + used
      else table.insert(own, place, {step, used}) end
    end
  end
  save(key, account)
end
return 1
"""
)

# Also deletes holders whose lease expired long ago. ZADD must be the first write: a full Redis refuses it
# only there, and what a full Redis would refuse to settle is not sent.
_RENEW = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local lease = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0)
local alive = lease >= now
redis.call('ZADD', KEYS[1], 'XX', string.format('%.3f', alive and now + {LEASE_S} or lease), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.3f', now - {LEASE_S}))
return alive and 1 or 0
"""


class RedisLimitStore:
    """Implements :class:`gateway.state.limits.LimitStore`.

    ``client`` is made by ``redis_client.connect``; this store closes it.
    """

    def __init__(self, client: Redis, *, namespace: str) -> None:
        self._client = client
        keys = prefix(namespace)
        self._account, self._holders = f"{keys}limit:", f"{keys}limit-holders"
        self._batch = f"{keys}limit-batch:"
        both = (LIMITS, BUDGETS)
        self._take: _Scripts = {one: client.register_script(_windows(one) + _TAKE) for one in both}
        self._settle: Callable[..., object] = client.register_script(_SETTLE)
        self._renew: Callable[..., object] = client.register_script(_RENEW)

    async def close(self) -> None:
        await self._client.aclose()

    async def take(
        self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest, *, fresh: bool
    ) -> QuotaVerdict | None:
        own, kinds = amounts(limits), kinds_of(limits)
        hold = ask.hold or _NOBODY
        answer = await send(
            self._client, "take",
            self._take[kinds](
                keys=(self._account + key_id, self._holders),
                args=(
                    hold.holder, hold.number, ask.requests, ask.tokens if ask.hold else 0,
                    *(-1 if limit is None else limit for limit in own), int(fresh),
                ),
            ),
        )  # fmt: skip
        if answer[0] < 0:
            return None
        figures = tuple(
            None if limit is None else Figures(limit, answer[3 + 2 * i], answer[4 + 2 * i] / 1000)
            for i, limit in enumerate(own)
        )
        return QuotaVerdict(_excess(answer, kinds, own, ask), figures, answer[1])

    async def settle(self, sender: str, number: int, settlements: Sequence[Settlement]) -> None:
        keys, arguments = [self._batch + sender], list[str | int]((number,))
        for one in settlements:
            hold = one.hold or _NOBODY
            keys.append(self._account + one.key_id)
            arguments += [hold.holder, hold.number, -1 if one.at is None else one.at, one.used]
            for kind, limit in zip(kinds_of(one.limits)[1:], amounts(one.limits)[1:], strict=True):
                arguments += [0, 0] if limit is None else [kind.step_s, kind.period_s]
        await send(self._client, "settle", self._settle(keys=keys, args=arguments))

    async def renew(self, holder: str) -> bool:
        return bool(await send(self._client, "renew", self._renew(keys=(self._holders,), args=(holder,))))


def _excess(
    answer: Sequence[int], kinds: Sequence[Limit], limits: Sequence[int | None], ask: QuotaRequest
) -> Excess | None:
    worst, _, wait_ms = answer[:3]
    if not worst:
        return None
    kind, limit = kinds[worst - 1], limits[worst - 1] or 0
    asked = ask.tokens if kind.of_tokens else ask.requests
    return Excess(kind.name, limit, asked, None if wait_ms < 0 else math.ceil(wait_ms) / 1000)
