"""The audit log: a record in the stream ``audit`` for each action of an operator."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
import structlog

from gateway.errors import public_error
from gateway.state.errors import StateError
from gateway.state.port import MAX_AUTHOR, StateStore

STREAM = "audit"
# Longest target and comment of a record, in characters.
MAX_TARGET = 256
MAX_COMMENT = 1_000

T = TypeVar("T")


class Audit:
    """Appends records; each is also a line of the log.

    Fails open: the action is already done, so when the store cannot be reached an error is logged and the
    record is in the log only.
    """

    def __init__(self, store: StateStore, *, unix_time: Callable[[], float]) -> None:
        self._store = store
        self._unix_time = unix_time
        self._log = structlog.get_logger("audit")

    async def record(
        self, who: str, action: str, target: str, *, comment: str = "", result: str = "done"
    ) -> None:
        """Record that ``who`` (a key's id) did ``action`` to ``target``, with this ``result``."""
        entry = {
            "at": self._unix_time(),
            "who": who,
            "action": action,
            "target": target[:MAX_TARGET],
            "result": result[:MAX_TARGET],
            "comment": comment[:MAX_COMMENT],
        }
        self._log.info("operator", who=who, action=action, target=entry["target"], result=entry["result"])
        try:
            await self._store.append(STREAM, orjson.dumps(entry), author=who[:MAX_AUTHOR] or "-")
        except StateError as error:
            self._log.error("audit record is in the log alone", action=action, reason=error.code)

    async def attempt(
        self,
        who: str,
        action: str,
        target: str,
        doing: Awaitable[T],
        *,
        comment: str = "",
        result: Callable[[T], str] = lambda done: "done",
    ) -> T:
        """Await an action and record it, with its ``result`` or with the error that it raises."""
        try:
            done = await doing
        except Exception as error:
            public = public_error(error)
            refused = f"refused: {public.code}: {public.message}"
            await self.record(who, action, target, comment=comment, result=refused)
            raise
        await self.record(who, action, target, comment=comment, result=result(done))
        return done

    async def last(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The last entries, newest first, each with its number. Raises StateUnavailable."""
        records = await self._store.read(STREAM, limit=limit, newest_first=True)
        return [{"number": record.number, **orjson.loads(record.data)} for record in records]
