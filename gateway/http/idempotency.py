"""``Idempotency-Key``: a repeated request gets the stored answer, which was generated and billed once.

* Whole 200 answers that a model made and that were billed are stored, and answers about created objects.
  Errors and answers from the response cache or the degraded fallback are not: a retry gets a real answer.
* While the first request of a key is in flight in this process, the same request waits for it; if the
  first one fails or its caller disconnects, the next one runs. Another body is a conflict at once. A claim
  in the store does the same between gateways; it ends soon after its gateway.
* An answer that is too large for the store, with logprobs for example, is not stored.
* The store fails closed when read (a caller that sends a key prefers waiting to paying twice) and open
  when written (the answer exists and is sent; the loss is logged).
"""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import Depends, Header
from msgspec import Struct
from msgspec.structs import replace
from starlette.datastructures import FormData
from starlette.requests import Request

from gateway.contracts.origin import Caller
from gateway.contracts.refusals import not_allowed
from gateway.errors import BackendUnavailable, DuplicateRequest, IdempotencyConflict
from gateway.http.body import form_content
from gateway.http.exchange import Exchange, Reply
from gateway.http.respond import log_defect
from gateway.state.errors import StateUnavailable
from gateway.state.idempotency import CLAIM_S, Claim, IdempotencyStore, StoredReply
from resilience.task_groups import all_or_error

MAX_KEY: Final = 255  # longest key, in characters, as in other public APIs
MAX_WAITING: Final = 64  # most requests that wait for one key; more mean a loop on the caller's side
POLL_S: Final = 0.2  # seconds between two looks at a request that runs at another gateway
RETRY_MS: Final = 1_000  # ``Retry-After`` if the wait was too long or the store failed, in milliseconds
HEADER: Final = "Idempotency-Key"
_REPLAY: Final = (b"x-idempotent-replay", b"true")

_log = logging.getLogger("gateway.http")


@dataclass(slots=True)
class _Turn:
    """The current requests of one key; the lock's holder runs, the others wait."""

    fingerprint: str
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def sent_key(exchange: Exchange) -> str | None:
    """The key of a request, if it has one. Raises InvalidRequest."""
    header = exchange.headers.get(b"idempotency-key")
    if header is None:
        return None
    key = header.decode("latin-1").strip()
    if not 1 <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        raise not_allowed(HEADER, f"has {len(key)} characters", f"1 to {MAX_KEY} printable ASCII characters")
    return key


def fingerprint_of(path: str, body: bytes, caller: Caller) -> str:
    """The digest by which requests are the same: the same path, bytes, and models that the API key may use.

    A stored answer may be of a model that another key may not use, or names otherwise.
    """
    if caller.models is not None or caller.aliases:
        path = f"{path} {caller.models and sorted(caller.models)} {sorted(caller.aliases)}"
    return hashlib.sha256(path.encode() + b"\n" + body).hexdigest()


class Idempotency:
    """Runs each key's request once; a repeated one waits for the first for at most ``wait_s``."""

    def __init__(self, store: IdempotencyStore, *, wait_s: float) -> None:
        self._store = store
        self._wait_s = wait_s
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._away = False

    async def answer(
        self,
        exchange: Exchange,
        key: str,
        fingerprint: str,
        run: Callable[[], Awaitable[Reply]],
        allowed: Callable[[], bool],
    ) -> Reply:
        """The stored reply if ``allowed()`` is true, else that of ``run``, which refuses forbidden requests.
        A stored reply sets ``replayed`` of the exchange.

        Raises IdempotencyConflict; DuplicateRequest: the first one is still running after ``wait_s``, or too
        many wait; BackendUnavailable: the store cannot be read.
        """
        tenant = exchange.known_caller.tenant
        turn = self._turns.setdefault((tenant, key), _Turn(fingerprint))
        if turn.fingerprint != fingerprint:
            raise _conflict()
        if turn.users > MAX_WAITING:
            raise _still_running()
        turn.users += 1
        until = asyncio.get_running_loop().time() + self._wait_s
        try:
            try:
                async with asyncio.timeout_at(until):
                    await turn.lock.acquire()
            except TimeoutError:
                raise _still_running() from None
            try:
                claim = Claim(uuid.uuid4().hex, fingerprint)
                stored = await self._read(tenant, key, claim, until)
                if stored is not None and allowed():
                    exchange.replayed = True
                    return Reply(stored.status, stored.body, stored.content_type.encode(), (_REPLAY,))
                return await self._run(tenant, key, claim, run)
            finally:
                turn.lock.release()
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[tenant, key]

    async def _read(self, tenant: str, key: str, claim: Claim, until: float) -> StoredReply | None:
        """The stored reply; ``None``: the request may run, under ``claim`` if the store takes writes."""
        while (found := await self._get(tenant, key, claim)) is not None:
            if found[0] != claim.fingerprint:
                raise _conflict()
            if found[1] is not None:
                return found[1]
            if asyncio.get_running_loop().time() + POLL_S > until:
                raise _still_running()
            await asyncio.sleep(POLL_S)
        return None

    async def _run(self, tenant: str, key: str, claim: Claim, run: Callable[[], Awaitable[Reply]]) -> Reply:
        kept = False
        try:
            async with all_or_error() as group:
                renewing = group.create_task(self._renew(tenant, key, claim))
                try:
                    reply = await run()
                    kept = reply.keep and await self._write(tenant, key, claim.fingerprint, reply)
                finally:
                    renewing.cancel()
            return reply
        finally:
            if not kept:
                await self._release(tenant, key, claim)

    async def _renew(self, tenant: str, key: str, claim: Claim) -> None:
        task = asyncio.current_task()
        while task is None or not task.cancelling():  # a client may suppress the cancellation
            await asyncio.sleep(CLAIM_S / 5)
            try:
                await self._store.renew(tenant, key, claim)
            except Exception as error:
                self._log(error)

    async def _release(self, tenant: str, key: str, claim: Claim) -> None:
        try:
            await self._store.release(tenant, key, claim)
        except Exception as error:
            self._log(error)  # it is void soon

    async def _get(self, tenant: str, key: str, claim: Claim) -> tuple[str, StoredReply | None] | None:
        try:
            try:
                found = await self._store.get(tenant, key, claim)
                self._away = False
                return found
            except Exception as error:
                self._log(error)
            # Its answer got lost, and it may have taken this claim or another, or it takes no writes.
            found = await self._store.get(tenant, key, claim, reads_only=True)
            if found is None:
                with suppress(StateUnavailable):
                    found = await self._store.get(tenant, key, claim)
            return found
        except asyncio.CancelledError:
            await self._release(tenant, key, claim)
            raise
        except Exception as error:
            self._log(error)
            raise BackendUnavailable(
                f"the store of {HEADER} does not answer", param=HEADER, retry_after_ms=RETRY_MS
            ) from None

    async def _write(self, tenant: str, key: str, fingerprint: str, reply: Reply) -> bool:
        stored = StoredReply(reply.status, reply.content_type.decode(), reply.body)
        try:
            kept = await self._store.put(tenant, key, fingerprint, stored)
        except Exception as error:
            self._log(error)
            return False
        if not kept:
            _log.warning(
                "an answer was not stored under its idempotency key; a retry will be generated again"
            )
        return kept

    def _log(self, error: Exception) -> None:
        """Log what the store raised; an outage once, until the store takes a claim again."""
        if not isinstance(error, StateUnavailable):
            log_defect(error, "-")
        elif not self._away:
            self._away = True
            _log.error("answers for idempotent requests: %s", error)


def _conflict() -> IdempotencyConflict:
    return IdempotencyConflict(
        f"{HEADER} was used with another request, or by an API key with other models; allowed: the same path "
        "and body, or a new key",
        param=HEADER,
    )


def _still_running() -> DuplicateRequest:
    return DuplicateRequest(
        f"the first request with this {HEADER} is still running", param=HEADER, retry_after_ms=RETRY_MS
    )


IdempotencyKey = Annotated[
    str | None,
    Header(description="Whole answers only: the same key and body give the stored answer again."),
]


class CallerRequest(Struct, frozen=True):
    """A request other than a generation, and the key under which its answer is stored, if it has one.

    Args:
        raw: the bytes of the body, unless that is a form.
        release: is called once the work is done or billed; from then on a disconnect does not cancel it.
    """

    exchange: Exchange
    idempotency: Idempotency
    path: str
    key: str | None
    raw: bytes
    release: Callable[[], object] = lambda: None

    def once(
        self, run: Callable[[], Awaitable[Reply]], allowed: Callable[[], bool] = lambda: True
    ) -> Awaitable[Reply]:
        """The reply stored for this key and body, or that of ``run``; as :meth:`Idempotency.answer`.

        An error that ``run`` raises is not stored.
        """
        # No coroutine of its own: it would be one more frame to resume at every wait of a request.
        if self.key is None:
            return run()
        content = fingerprint_of(self.path, self.raw, self.exchange.known_caller)
        return self.idempotency.answer(self.exchange, self.key, content, run, allowed)

    async def once_of(
        self,
        form: FormData,
        run: Callable[[], Awaitable[Reply]],
        allowed: Callable[[], bool] = lambda: True,
    ) -> Reply:
        """:meth:`once` for a request whose body is a form."""
        call = self if self.key is None else replace(self, raw=await form_content(form))
        return await call.once(run, allowed)


async def _call(request: Request, idempotency_key: IdempotencyKey = None) -> CallerRequest:
    """The FastAPI dependency; its parameter only documents the header in the OpenAPI document."""
    scope, state = request.scope, request.app.state
    exchange, raw = Exchange.of(scope), await request.body()
    return CallerRequest(exchange, state.idempotency, scope["path"], sent_key(exchange), raw)


CallerRequestDep = Annotated[CallerRequest, Depends(_call)]
