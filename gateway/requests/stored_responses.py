"""A tenant's stored responses: conversations continue from them, and clients read them again."""

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import orjson
import structlog
from pydantic_core import to_json

from accounting.errors import LedgerUnavailable
from accounting.stored_responses import CANCELLED, UNFINISHED, ResponseStore, StoredResponse
from gateway.config.responses import ResponsesSection
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.responses.stream import ended_elsewhere
from gateway.errors import InvalidRequest, NotFound

MAX_TURNS: Final = 4_096  # the most responses of one conversation
_FAST: Final = 1  # compression level: texts shrink to a third, in 10 ms per megabyte
INLINE_BYTES: Final = 65_536  # largest body of a request that is packed on the event loop: in 1 ms
RETRY_MS: Final = 1_000
_NONE: Final = "no response is stored here"


class StoredResponses:
    """Packs and unpacks stored responses. Reads raise NotFound, LedgerUnavailable.

    With ``store`` ``None``, responses are not stored.
    """

    def __init__(
        self,
        store: ResponseStore | None = None,
        section: ResponsesSection | None = None,
        unix_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.section = section or ResponsesSection()
        self._store = store
        self.now = unix_time
        self._log = structlog.get_logger("gateway.responses")

    @property
    def enabled(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> ResponseStore:
        """The store. Raises NotFound if there is none."""
        if self._store is None:
            raise NotFound(_NONE, param="response_id")
        return self._store

    def packed(
        self, asked: ResponsesRequest, response: Mapping[str, Any], events: bytes | None = None
    ) -> StoredResponse:
        now = self.now()
        return StoredResponse(
            tenant=asked.request.caller.tenant,
            response_id=response["id"],
            previous_id=asked.previous_id,
            status=response["status"],
            created_at=now,
            expires_at=now + self.section.keep_seconds,
            # Labels, such as arguments that a client has parsed, may hold numbers that orjson cannot write.
            input=zlib.compress(to_json(asked.items, inf_nan_mode="null"), _FAST),
            body=_pack(response),
            events=None if events is None else zlib.compress(events, _FAST),
            again=None if asked.again is None else b"",
        )

    async def keep(self, asked: ResponsesRequest, response: dict[str, Any]) -> None:
        """Store a response before its end is sent; if that fails, add a warning to the response."""
        row = await self.to_keep(asked, response)
        if row is not None:
            try:
                await self.store.put(row)
            except LedgerUnavailable as error:
                self._not_stored(response, str(error))

    async def to_keep(self, asked: ResponsesRequest, response: dict[str, Any]) -> StoredResponse | None:
        """Pack a response that is to be stored; ``None``, and a warning in it, if it is too large."""
        large = asked.size > INLINE_BYTES
        row = await asyncio.to_thread(self.packed, asked, response) if large else self.packed(asked, response)
        if row.size <= self.section.max_bytes:
            return row
        self._not_stored(response, f"larger than {self.section.max_bytes} bytes")
        return None

    def _not_stored(self, response: dict[str, Any], reason: str) -> None:
        response["store"] = False
        response["sluice"]["warnings"] = [*response["sluice"]["warnings"], f"not stored: {reason}"]
        self._log.warning("response not stored", response=response["id"], reason=reason)

    async def before(self, tenant: str, previous_id: str | None, max_bytes: int) -> list[Mapping[str, Any]]:
        """Return the items of the conversation that a request continues, oldest first.

        Raises InvalidRequest for a conversation of more than ``max_bytes``, and one whose last response runs.
        """
        if previous_id is None:
            return []
        if not self.enabled:
            raise NotFound(_NONE, param="previous_response_id")
        rows = await self._thread(tenant, previous_id, "previous_response_id", max_bytes)
        if rows[-1].status in UNFINISHED:
            raise not_allowed("previous_response_id", "has not ended yet", "a response that has ended")
        return [*chain.from_iterable(_items(rows, "previous_response_id", max_bytes))]

    async def input_items(self, tenant: str, response_id: str, max_bytes: int) -> list[Mapping[str, Any]]:
        """Return the model's input for a response: the conversation before it and its own input.

        Raises InvalidRequest for more than ``max_bytes``.
        """
        rows = await self._thread(tenant, response_id, "response_id", max_bytes)
        return [*chain.from_iterable(_items(rows, "response_id", max_bytes)[:-1])]

    async def referenced(self, tenant: str, items: Mapping[str, str], max_bytes: int) -> list[dict[str, Any]]:
        """The stored items that a request refers to; ``items`` has the path of each reference by item id.

        An item's id contains that of its response. Raises NotFound for one that is not stored for the
        tenant, InvalidRequest for more than ``max_bytes`` or ``MAX_TURNS`` responses.
        """
        if not self.enabled:
            raise NotFound(_NONE, param=next(iter(items.values())))
        rows: dict[str, dict[str, Mapping[str, Any]]] = {}
        found, room = list[dict[str, Any]](), max_bytes
        for item_id, param in items.items():
            if "\x00" in item_id:
                raise NotFound("no item with a null character (U+0000) in its id is stored", param=param)
            response_id = f"resp_{'_'.join(item_id.split('_')[1:-1])}"
            if response_id not in rows:
                row = await self.store.get(tenant, response_id, self.now())
                known: dict[str, Mapping[str, Any]] = {}
                if row is not None:
                    known = {one["id"]: one for part in _items([row], param, room) for one in part}
                    room -= sum(len(orjson.dumps(one)) for one in known.values())
                rows[response_id] = known
            if len(rows) > MAX_TURNS or room < 0:
                raise _too_long(param, max_bytes)
            if item_id not in rows[response_id]:
                raise NotFound(f"no item '{path_of([item_id])}' of a response is stored", param=param)
            found.append(dict(rows[response_id][item_id]))
        return found

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        found = await self.store.get(tenant, response_id, self.now())
        if found is None:
            raise _unknown(response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response; a running one is ended."""
        if not await self.store.delete(tenant, response_id):
            raise _unknown(response_id)

    async def end(self, row: StoredResponse, response: Mapping[str, Any]) -> bool:
        """End an unfinished response in place of the gateway that ran it; false if it has already ended.

        A cancelled response is left to the gateway that runs it for as long as that one may be alive.
        """
        status = response["status"]
        alive_until = row.alive_until if status == CANCELLED else None
        ended = replace(row, status=status, body=_pack(response), alive_until=alive_until, again=None)
        return await self.store.finish(ended)

    async def _thread(
        self, tenant: str, response_id: str, param: str, max_bytes: int
    ) -> Sequence[StoredResponse]:
        rows = await self.store.thread(tenant, response_id, self.now(), most=MAX_TURNS, most_bytes=max_bytes)
        if not rows:
            raise _unknown(response_id, param, ", or not all before it in its conversation")
        if rows[0].previous_id is not None:
            raise _too_long(param, max_bytes)
        return rows


def response_of(row: StoredResponse) -> dict[str, Any]:
    """Unpack the response object. Raises NotFound if the row is damaged."""
    with _undamaged(row, "response_id"):
        found: dict[str, Any] = orjson.loads(zlib.decompress(row.body))
    return found


def events_of(row: StoredResponse, after: int) -> bytes:
    """Unpack the event stream of a background response: at least its events after the number ``after``.

    Raises NotFound if the row is damaged.
    """
    if row.events is None:
        return ended_elsewhere(response_of(row), after)
    with _undamaged(row, "response_id"):
        return zlib.decompress(row.events)


@contextmanager
def _undamaged(row: StoredResponse, param: str) -> Iterator[None]:
    """Raise NotFound for data of the row that cannot be unpacked, and log it."""
    try:
        yield
    except (ValueError, zlib.error) as damage:
        log = structlog.get_logger("gateway.responses")
        log.error("response is damaged", response=row.response_id, reason=str(damage))
        shown = path_of([row.response_id])
        raise NotFound(
            f"the stored response '{shown}' is damaged; it can only be deleted", param=param
        ) from None


def _unknown(response_id: str, param: str = "response_id", alternative: str = "") -> NotFound:
    return NotFound(f"no response '{path_of([response_id])}' is stored{alternative}", param=param)


def _items(rows: Sequence[StoredResponse], param: str, max_bytes: int) -> list[list[Mapping[str, Any]]]:
    """Return each response's input, then its output; a few compressed bytes may be many, hence the limit."""
    found, room = list[list[Mapping[str, Any]]](), max_bytes
    for row in rows:
        texts = []
        with _undamaged(row, param):
            for data in (row.input, row.body):
                texts.append(zlib.decompressobj().decompress(data, room + 1))
                room -= len(texts[-1])
                if room < 0:
                    raise _too_long(param, max_bytes)
            found += [orjson.loads(texts[0]), orjson.loads(texts[1])["output"]]
    return found


def _too_long(param: str, max_bytes: int) -> InvalidRequest:
    return not_allowed(param, "is of a conversation that is too long", f"{max_bytes} bytes or fewer in all")


def _pack(value: object) -> bytes:
    return zlib.compress(orjson.dumps(value), _FAST)
