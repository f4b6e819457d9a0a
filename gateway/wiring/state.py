"""Builds the state store, the idempotent replies, and the followers of streams."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from gateway.config.errors import ConfigError
from gateway.config.state import StateConfig
from gateway.state.errors import StateUnavailable
from gateway.state.idempotency import Claim, IdempotencyStore
from gateway.state.local_copy import LocalCopy
from gateway.state.port import Record, StateStore
from gateway.state.projection import LatestRecord
from gateway.state.stream_follower import StreamFollower
from gateway.state.url import StateUrl, parse_state_url
from gateway.wiring.state_store import copies_folder, make_idempotency_store, make_state_store


@dataclass(slots=True)
class StateParts:
    """The state store; ``copies`` is the folder of local copies."""

    url: StateUrl
    store: StateStore
    idempotency: IdempotencyStore
    copies: Path | None
    clock: Callable[[], float]
    followers: dict[str, StreamFollower | LatestRecord] = field(default_factory=dict)
    _reached: bool = False

    @property
    def ready(self) -> bool:
        """Whether this gateway has the state that it needs to serve (``/ready``).

        A gateway that cannot read its local file is not ready: another gateway serves better. A shared store
        is unreachable for all gateways at once, and none would serve if each were not ready. So a gateway
        stays ready with the last good state once it has reached the store or applied a local copy.
        """
        if healthy := self.store.healthy:
            self._reached = True
        copied = any(one.number > 0 for one in self.followers.values())
        return healthy or (self.url.kind == "redis" and (self._reached or copied))

    def follow(
        self,
        stream: str,
        apply: Callable[[Record], None],
        *,
        prepare: Callable[[Record], Awaitable[bool]] | None = None,
        informational: bool = False,
    ) -> StreamFollower:
        """Follow ``stream`` while this object runs; a stream has one follower.

        An ``informational`` stream has no local copy, and the store may lose records of it.
        """
        copy = None if self.copies is None or informational else LocalCopy(self.copies, stream)
        follower = StreamFollower(
            self.store,
            stream,
            apply,
            copy=copy,
            clock=self.clock,
            prepare=prepare,
            informational=informational,
        )
        self.followers[stream] = follower
        return follower

    def follow_latest(self, stream: str, apply: Callable[[Record], None]) -> LatestRecord:
        """Follow a stream of which only the last record counts."""
        latest = self.followers[stream] = LatestRecord(self.store, stream, apply)
        return latest

    def figures(self) -> tuple[bool, Mapping[str, tuple[int, str]]]:
        """Return, for the metrics, whether the store works, and the state of each followed stream."""
        streams = {name: (one.number, one.state.value) for name, one in self.followers.items()}
        return self.store.healthy and not self.store.refuses_writes, streams

    async def open(self) -> None:
        """Open the store and apply each followed stream; an unreachable store is not an error.

        Raises ConfigError: the file's folder cannot be made, and there are no copies to serve with.
        """
        if self.url.path is not None and self.copies is not None and not self.copies.is_dir():
            make_state_folder(self.url.path.parent)
        await self.store.open()
        if self.url.path is not None:
            # Makes the file of replies now: a disk that fills later would prevent it.
            with contextlib.suppress(StateUnavailable):
                await self.idempotency.release("", "", Claim("", ""))
        async with asyncio.TaskGroup() as starts:
            for follower in self.followers.values():
                starts.create_task(follower.start(), name=f"start-{follower.stream}")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.store.run(), name="state-store")
            for follower in self.followers.values():
                loops.create_task(follower.run(), name=f"follower-{follower.stream}")

    async def close(self) -> None:
        try:
            await self.idempotency.close()
        finally:
            await self.store.close()


def make_state(
    config: StateConfig, *, clock: Callable[[], float], unix_time: Callable[[], float]
) -> StateParts:
    """Build the store. Raises ConfigError for the url, or if a required package is missing."""
    url = parse_state_url(config.url)
    copies = copies_folder(url, namespace=config.namespace, cache_dir=config.cache_dir)
    if url.path is not None and copies is not None:
        _forget_deleted(url.path, copies)
    return StateParts(
        url=url,
        store=make_state_store(
            url, namespace=config.namespace, unix_time=unix_time, poll_s=config.poll_seconds
        ),
        idempotency=make_idempotency_store(url, namespace=config.namespace, unix_time=unix_time),
        copies=copies,
        clock=clock,
    )


def make_state_folder(folder: Path, keys: str = "state.url") -> None:
    """Make the folder, for its owner only: its files hold answers and digests of keys.

    Raises ConfigError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{keys}: the folder {folder.absolute()} cannot be made ({error.strerror}); "
            "start where the gateway may write, or name another place"
        ) from None


def _forget_deleted(path: Path, copies: Path) -> None:
    """Delete the local copies if the state file was deleted, so that they do not restore its state."""
    if not path.exists() and copies.is_dir():
        structlog.get_logger("state").warning(
            "the state file was deleted: its local copies are deleted too", file=str(path), copies=str(copies)
        )
        shutil.rmtree(copies, ignore_errors=True)
