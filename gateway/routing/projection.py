"""The routing in force in this process: the last record of the stream ``routing``, and its changes.

Each record is a whole configuration with its comment and parent; the revision has the record's number. If
this process cannot use a record, for example because it names an unknown backend, the last good revision
stays in force, and the process reports the unusable one and continues with the next record.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gateway.contracts.refusals import not_allowed, path_of
from gateway.errors import BackendUnavailable
from gateway.routing.change import ConfigChange, differences, same
from gateway.routing.check import KnownNames, adapters_named
from gateway.routing.records import Draft, Stored, from_record, to_data
from gateway.routing.revision import Revision, RoutingFileError, make_revision
from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import Record, StateStore
from gateway.state.projection import FollowedStream

STREAM = "routing"
MAX_TRIES = 20  # most attempts to append; each failed attempt means that another process was first
ELSEWHERE_S = 1.0  # longest wait, in seconds, for a revision that is in force in another process
RETRY_MS = 1_000  # milliseconds after which an operator may try again
# Seconds between attempts to write the first revision while the store is unreachable.
SEED_AGAIN_S = 1.0
SEED_AUTHOR = "file"
# Revisions that are compared with the routing file at the start; most differences that a warning shows.
COMPARED, SHOWN = 100, 10


@dataclass(frozen=True, slots=True)
class UnusableRevision:
    """The stream's last revision, when this process cannot use it, and the reason."""

    revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class Seed:
    """The content of ``routing.file``, or its fault; with a fault, the store must have a revision."""

    source: str
    config: Mapping[str, Any] | None
    fault: RoutingFileError | None = None
    file: str | None = None


@dataclass(eq=False)
class RoutingProjection(FollowedStream):
    """Applies the stream's records, and appends new ones; ``known`` are the names that a revision may use."""

    store: StateStore
    known: KnownNames
    seed: Seed
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._log = structlog.get_logger("routing")
        self._revision: Revision | None = None
        # The configuration that this process validated last in a thread, and what became of it.
        self._checked: tuple[Mapping[str, Any], Revision | None] = ({}, None)
        self.in_force: Stored | None = None
        self.in_force_since = 0.0
        self.latest: Stored | None = None
        self.head = 0
        self.unusable: UnusableRevision | None = None
        self.pending: Sequence[ConfigChange] = ()
        self._started = False  # the records that are read before the start are history, and not logged

    def current(self) -> Revision:
        """Return the revision in force. Raises RuntimeError before :meth:`start`."""
        if self._revision is None:
            raise RuntimeError("there is no routing yet; start() has not ended")
        return self._revision

    @property
    def number(self) -> int:
        """The number of the revision in force; 0 for the routing file while the store does not have it."""
        return 0 if self._revision is None else self._revision.number

    async def prepare(self, record: Record) -> bool:
        """Validate a record in a thread before :meth:`take` applies it; return whether it can be used here.

        :meth:`take` reports its faults.
        """
        try:
            stored = from_record(record)
            if self._checked[1] is None or self._checked[0] != stored.draft.config:
                self._checked = stored.draft.config, await asyncio.to_thread(self._revision_of, stored)
        except (RoutingFileError, KeyError, TypeError, ValueError):
            return False
        return True

    def take(self, record: Record) -> None:
        """Apply a record, or set ``unusable`` to the reason why it cannot be applied; raises nothing."""
        self.head = record.number
        try:
            stored = from_record(record)
            self.latest = stored
            self._adopt(stored)
            self.unusable = None
        except (RoutingFileError, KeyError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, RoutingFileError) else "its record is not understood"
            self.unusable = UnusableRevision(record.number, reason)
            self._log_unusable()

    async def check(self, draft: Draft) -> Revision:
        """Validate ``draft`` as the next revision, and return that. Raises RoutingFileError.

        In a thread: thousands of routes take a second. Adapters that the last revision names are allowed even
        if they no longer exist, so that weights can still be changed and a canary rolled back.
        """
        known = self.known
        if known.adapters is not None:
            named = adapters_named(self.last().draft.config)
            known = replace(known, adapters={*known.adapters, *named})
        return await asyncio.to_thread(make_revision, self.head + 1, draft.config, known, source="config")

    def check_backend(self, name: str) -> None:
        """Refuse a change of a backend that does not exist. Raises InvalidRequest."""
        if name not in self.known.backends:
            raise not_allowed("backend", f"is '{path_of([name])}'", ", ".join(sorted(self.known.backends)))

    async def start(self) -> None:
        """Put a revision in force: the store's last one, else the routing file as the first one.

        While the store is unreachable and there is no local copy, the file is in force as number 0.

        Raises RoutingFileError if the file is invalid and the store has no usable revision.
        """
        self._started = True
        self._log_in_force()
        self._log_unusable()
        if self.head:
            await self.compare_file()
        elif self.seed.fault is None:
            try:
                await self._seed_store()
            except StateUnavailable as error:
                self._log.warning("the first routing revision is not written yet", reason=str(error))
        if self._revision is None:
            if self.seed.config is None:
                faults = (self.seed.fault, self.unusable and self.unusable.reason)
                raise RoutingFileError("\n".join(str(fault) for fault in faults if fault))
            self._adopt(Stored(0, self.unix_time(), SEED_AUTHOR, 0, _seed_draft(self.seed)))
            self._log.warning(
                "routing by routing.file", store="unreachable" if not self.head else "not usable here"
            )

    async def compare_file(self) -> None:
        """Warn if the routing file has a fault, or equals none of the last revisions.

        In the second case ``pending`` is set to its changes.
        """
        seed, stored = self.seed, self.in_force
        if seed.fault is not None:
            self._log.warning("the routing file has a fault and is not in force", reason=str(seed.fault))
            return
        if seed.file is not None and seed.config is not None and stored is not None:
            try:
                known = [one.draft.config for one in await self.newest(COMPARED)]
            except StateUnavailable:
                return
            if not any(same(seed.config, config) for config in known):
                self.pending = differences(stored.draft.config, seed.config)
                self._log.warning(
                    "the routing file was changed and is not in force",
                    in_force=stored.number,
                    changes=[f"{one.path}: {one.before} -> {one.after}" for one in self.pending][:SHOWN],
                    apply=f"sluice routes apply {seed.file}",
                )
                return
        self._log.info("routing.file is not used: the state store has revisions", revision=self.head)

    async def run(self) -> None:
        """Write the first revision as soon as the store is reached, if the store has none."""
        while not self.head and self.seed.config is not None:
            await asyncio.sleep(SEED_AGAIN_S)
            if not self.head:
                with suppress(StateUnavailable):  # logged once, by start()
                    await self._seed_store()

    async def change(
        self, decide: Callable[[Stored], Draft], *, author: str, expected: int | None = None
    ) -> tuple[Stored, Stored]:
        """Append the draft that ``decide`` makes of the last revision, and wait until it is in force here.

        Returns the previous and the new revision. Without ``expected``, ``decide`` is called again if another
        process was first.

        Raises:
            RoutingFileError: the draft is invalid; ``decide`` may raise other errors.
            Conflict: the last revision is not ``expected``.
            BackendUnavailable: other processes were first, too many times, or the revision was written but is
                not in force here yet.
            StateUnavailable, RecordTooLarge: the store did not accept the draft.
        """
        await self.expect_last(expected)
        for _ in range(MAX_TRIES):
            latest, parent = self.last(), self.head
            draft = decide(latest)
            self._checked = draft.config, await self.check(draft)
            try:
                record = await self.followed.append(to_data(draft, parent), author=author, expected=parent)
            except Conflict:
                if expected is not None:
                    raise
                if not await self.caught_up_to(parent + 1):
                    break
                continue
            if not await self.caught_up_to(record.number):
                raise BackendUnavailable(
                    f"revision {record.number} was written and is not in force here yet",
                    retry_after_ms=RETRY_MS,
                )
            return latest, from_record(record)
        raise BackendUnavailable(
            "others change the routing at this moment; nothing was changed", retry_after_ms=RETRY_MS
        )

    def last(self) -> Stored:
        """Return the base of the next change: the last decodable revision, else the one in force."""
        stored = self.latest or self.in_force
        if stored is None:
            raise RuntimeError("there is no routing yet; start() has not ended")
        return stored

    async def read(self, number: int, count: int = 1) -> list[Stored]:
        """Return up to ``count`` revisions from ``number`` downwards, without undecodable ones.

        Raises StateUnavailable.
        """
        first = max(number - count, 0)
        records = await self.store.read(STREAM, after=first, limit=max(1, number - first))
        return self._understood(reversed(records))

    async def newest(self, count: int) -> list[Stored]:
        """Return the store's last revisions, newest first. Raises StateUnavailable."""
        return self._understood(await self.store.read(STREAM, limit=count, newest_first=True))

    def _understood(self, records: Iterable[Record]) -> list[Stored]:
        found: list[Stored] = []
        for record in records:
            try:
                found.append(from_record(record))
            except (KeyError, TypeError, ValueError):
                self._log.warning("a routing revision is not understood", revision=record.number)
        return found

    def _adopt(self, stored: Stored) -> None:
        """Put a revision in force. Raises RoutingFileError without any change."""
        config, checked = self._checked
        if checked is not None and config == stored.draft.config:
            revision = replace(checked, number=stored.number)
        else:
            revision = self._revision_of(stored)
        self._revision, self.in_force, self.in_force_since = revision, stored, self.unix_time()
        self._log_in_force()

    def _log_in_force(self) -> None:
        if self._started and (stored := self.in_force) is not None:
            self._log.info(
                "routing revision in force",
                revision=stored.number,
                author=stored.author,
                action=stored.draft.action,
            )

    def _log_unusable(self) -> None:
        if self._started and self.unusable is not None:
            self._log.error(
                "a routing revision cannot be used here; the last usable one stays in force",
                revision=self.unusable.revision,
                in_force=self.number,
                reason=self.unusable.reason,
            )

    def _revision_of(self, stored: Stored) -> Revision:
        """Validate a stored revision. Raises RoutingFileError."""
        known = replace(self.known, adapters=None)
        return make_revision(stored.number, stored.draft.config, known, source=f"revision {stored.number}")

    async def _seed_store(self) -> None:
        """Write the first revision. Raises StateUnavailable."""
        data = to_data(_seed_draft(self.seed), 0)
        try:
            await self.store.append(STREAM, data, author=SEED_AUTHOR, expected=0)
        except Conflict:
            self._log.info("another process wrote the first routing revision")
        await self.caught_up_to(1)

    async def expect_last(self, expected: int | None) -> None:
        """Wait until ``expected`` is the last revision here; ``None`` skips the check.

        Raises Conflict if another revision is the last one.
        """
        if expected is not None and expected > self.head:
            await self.caught_up_to(expected, ELSEWHERE_S)
        if expected is not None and expected != self.head:
            raise Conflict(STREAM, expected, self.head)


def _seed_draft(seed: Seed) -> Draft:
    return Draft(seed.config or {}, f"seeded from {seed.source}", "seed")
