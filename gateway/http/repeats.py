"""``Idempotency-Key`` for requests other than generations."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Header
from msgspec import Struct
from starlette.datastructures import FormData
from starlette.requests import Request

from gateway.http.exchange import Exchange, Reply
from gateway.http.forms import form_content
from gateway.http.idempotency import Idempotency, fingerprint_of, key_of

IdempotencyKey = Annotated[
    str | None,
    Header(description="Whole answers only: the same key and body give the stored answer again."),
]


class Repeatable(Struct, frozen=True):
    """A request, and the key under which its answer is stored, if it has one.

    Args:
        release: is called once the work is done or billed; from then on a disconnect does not cancel it.
    """

    exchange: Exchange
    path: str
    key: str | None
    idempotency: Idempotency
    release: Callable[[], None] = lambda: None

    @staticmethod
    def of(
        exchange: Exchange, path: str, idempotency: Idempotency, release: Callable[[], None] = lambda: None
    ) -> "Repeatable":
        """The request of this exchange. Raises InvalidRequest: the key is not valid."""
        header = exchange.headers.get(b"idempotency-key")
        return Repeatable(exchange, path, None if header is None else key_of(header), idempotency, release)

    def once(
        self,
        body: bytes,
        run: Callable[[], Awaitable[Reply]],
        allowed: Callable[[], bool] = lambda: True,
    ) -> Awaitable[Reply]:
        """The reply stored for this key and ``body``, or that of ``run``; as :meth:`Idempotency.answer`.

        An error that ``run`` raises is not stored.
        """
        # No coroutine of its own: it would be one more frame to resume at every wait of a request.
        if self.key is None:
            return run()
        content = fingerprint_of(self.path, body)
        return self.idempotency.answer(self.exchange, self.key, content, run, allowed)

    async def once_of(
        self,
        form: FormData,
        run: Callable[[], Awaitable[Reply]],
        allowed: Callable[[], bool] = lambda: True,
    ) -> Reply:
        """:meth:`once` for a request whose body is a form."""
        return await self.once(b"" if self.key is None else await form_content(form), run, allowed)


async def _repeatable(request: Request, idempotency_key: IdempotencyKey = None) -> Repeatable:
    """The FastAPI dependency; its parameter only documents the header in the OpenAPI document."""
    return Repeatable.of(Exchange.of(request.scope), request.scope["path"], request.app.state.idempotency)


Repeats = Annotated[Repeatable, Depends(_repeatable)]
