"""Idempotent replies in Redis: each under a key that expires, indexed to bound their bytes."""

import hashlib
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from gateway.state.idempotency import CLAIM_S, KEEP_S, Claim, ReplyBounds, StoredReply
from gateway.state.redis_client import ask, prefix

# Stores the reply unless there is one that has not expired by the gateway's clock (Redis expires keys by its
# own clock). Then it drops, in this order: up to 100 expired replies, the tenant's oldest beyond its limit,
# and the oldest of the largest tenant beyond the limit of all. The first write needs memory, so a full Redis
# refuses the script. KEYS: the reply, all replies by time, size and tenant of each reply, tenants by bytes.
# Other keys that the script uses are not declared; they are in the slot of the namespace.
_PUT = """
local all, sizes, tenants = KEYS[2], KEYS[3], KEYS[4]
local digest, tenant, size = ARGV[2], ARGV[3], ARGV[4]
local prefix = string.sub(KEYS[1], 1, -#digest - 1)
local function own(name) return all .. ':' .. name end
local function forget(one)
  local bytes, owner = string.match(redis.call('HGET', sizes, one) or '', '^(%d+) (.+)$')
  redis.call('ZREM', all, one)
  redis.call('HDEL', sizes, one)
  if not owner then return end
  redis.call('ZREM', own(owner), one)
  if tonumber(redis.call('ZINCRBY', tenants, -tonumber(bytes), owner)) <= 0 then
    redis.call('ZREM', tenants, owner)
  end
end
local function drop(one)
  redis.call('DEL', prefix .. one)
  forget(one)
end
local function drop_oldest_of(owner)
  local oldest = redis.call('ZRANGE', own(owner), 0, 0)[1]
  if oldest then drop(oldest) else redis.call('ZREM', tenants, owner) end
end
local function bytes_of_all()
  local sum, found = 0, redis.call('ZRANGE', tenants, 0, -1, 'WITHSCORES')
  for i = 2, #found, 2 do sum = sum + tonumber(found[i]) end
  return sum
end
local at = redis.call('ZSCORE', all, digest)
if at and tonumber(at) >= tonumber(ARGV[7]) and redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
if at then forget(digest) end
local expired = redis.call('ZRANGEBYSCORE', all, '-inf', '(' .. ARGV[7], 'LIMIT', 0, 100)
for _, one in ipairs(expired) do drop(one) end
redis.call('ZADD', all, ARGV[6], digest)
redis.call('ZADD', own(tenant), ARGV[6], digest)
redis.call('HSET', sizes, digest, size .. ' ' .. tenant)
redis.call('ZINCRBY', tenants, size, tenant)
while tonumber(redis.call('ZSCORE', tenants, tenant) or '0') > tonumber(ARGV[8]) do drop_oldest_of(tenant) end
while bytes_of_all() > tonumber(ARGV[9]) do
  drop_oldest_of(redis.call('ZREVRANGE', tenants, 0, 0)[1])
end
return 1
"""


# The reply in KEYS[1], or else the claim in KEYS[2] unless it is new or cannot be written.
_CLAIM = f"""
local reply = redis.call('GET', KEYS[1])
if reply then return {{reply, false}} end
local claim = redis.call('GET', KEYS[2])
if claim then return {{false, claim}} end
redis.pcall('SET', KEYS[2], ARGV[1], 'PX', {int(CLAIM_S * 1000)})
return {{false, false}}
"""
# ARGV: the claim, and the milliseconds for which it is valid from now on.
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"


class _Stored(msgspec.Struct, array_like=True):
    fingerprint: str
    reply: StoredReply
    stored_at: float


class RedisIdempotencyStore:
    """Stores replies for 24 hours in Redis.

    ``client`` is made by ``redis_client.connect``; this store closes it.
    """

    def __init__(
        self,
        client: Redis,
        *,
        namespace: str,
        unix_time: Callable[[], float],
        bounds: ReplyBounds | None = None,
    ) -> None:
        self._client = client
        keys = prefix(namespace)
        self._prefix = f"{keys}reply:"
        self._indexes = (f"{keys}replies-by-time", f"{keys}reply-sizes", f"{keys}reply-bytes")
        self._unix_time = unix_time
        self._bounds = bounds or ReplyBounds()
        self._claims = f"{keys}reply-claim:"
        self._claim: Callable[..., object] = client.register_script(_CLAIM)
        self._renew: Callable[..., object] = client.register_script(_RENEW)
        self._put: Callable[..., object] = client.register_script(_PUT)

    async def close(self) -> None:
        await self._client.aclose()

    async def get(
        self, tenant: str, key: str, claim: Claim, *, reads_only: bool = False
    ) -> tuple[str, StoredReply | None] | None:
        digest = _digest(tenant, key)
        names, own = (self._prefix + digest, self._claims + digest), " ".join(claim)
        asked = self._client.mget(names) if reads_only else self._claim(keys=names, args=(own,))
        found, other = await ask(self._client, "get", asked)
        if found is None and other is not None and other.decode() != own:
            return other.decode().partition(" ")[2], None
        if found is None:
            return None
        stored = msgspec.msgpack.decode(found, type=_Stored)
        # Redis expires keys by its own clock, which may differ from the gateway's.
        if stored.stored_at < self._unix_time() - KEEP_S:
            return None
        return stored.fingerprint, stored.reply

    async def renew(self, tenant: str, key: str, claim: Claim, for_s: float = CLAIM_S) -> None:
        name, milliseconds = self._claims + _digest(tenant, key), int(for_s * 1000)
        renewing = self._renew(keys=(name,), args=(" ".join(claim), milliseconds))
        await ask(self._client, "renew", renewing)

    async def release(self, tenant: str, key: str, claim: Claim) -> None:
        await self.renew(tenant, key, claim, 0.0)

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        if reply.size > self._bounds.reply:
            return False
        now, digest = self._unix_time(), _digest(tenant, key)
        row = _Stored(fingerprint, reply, now)
        # Times as strings with all digits: the float formatting of Redis drops digits.
        arguments = (
            msgspec.msgpack.encode(row), digest, tenant, reply.size, int(KEEP_S * 1000),
            repr(now), repr(now - KEEP_S), self._bounds.tenant, self._bounds.all,
        )  # fmt: skip
        await ask(
            self._client, "put", self._put(keys=(self._prefix + digest, *self._indexes), args=arguments)
        )
        return True


def _digest(tenant: str, key: str) -> str:
    """Hash tenant and key, because a key may be long; the tenant's length separates the two."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode("utf-8", "surrogatepass")).hexdigest()
