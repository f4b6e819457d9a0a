"""Stores the hash of each published prompt version, so that a published text never changes unnoticed.

The first start with an id publishes it: its hash stays in the state store, even if the file is deleted. A
start with another text under a published id is refused. If the state store cannot be reached at the start,
the gateway logs a warning and starts without this check: a broken disk must not stop an operator who changed
no prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from gateway.contracts.times import iso_time
from gateway.prompts.versions import PromptFileError, PromptVersions
from gateway.state.errors import Conflict, StateError, StateUnavailable
from gateway.state.port import MAX_READ, StateStore

STREAM = "prompts.published"
AUTHOR = "gateway"
MAX_PUBLISHED = 100_000  # the most ids in one state store; people publish, so there are few
MAX_TRIES = 50  # how often another process may append first; usually it has published the same versions


class Published(msgspec.Struct, frozen=True):
    """The hash of one published id, and its publication time in seconds since 1970."""

    id: str
    sha256: str
    published_at: float


class _Batch(msgspec.Struct):
    versions: list[Published]


class PromptChanged(PromptFileError):
    """A published id has another text now; one line for each such id."""


@retry(retry=retry_if_exception_type(Conflict), stop=stop_after_attempt(MAX_TRIES), reraise=True)
async def publish_hashes(
    store: StateStore, hashes: Mapping[str, str], *, at: float
) -> Mapping[str, Published]:
    """Store the versions whose id is new, and return all. Of two processes that start at the same time, one
    stores, and both return the same. Raises StateError."""
    head, published = await read_published(store)
    new = {one: Published(one, sha256, at) for one, sha256 in hashes.items() if one not in published}
    if len(published) + len(new) > MAX_PUBLISHED:
        raise StateUnavailable("append", f"{len(published)} prompt versions; allowed: {MAX_PUBLISHED}")
    if new:
        data = msgspec.json.encode(_Batch([*new.values()]))
        await store.append(STREAM, data, author=AUTHOR, expected=head)
    return {**published, **new}


async def read_published(store: StateStore) -> tuple[int, dict[str, Published]]:
    """Return the stream's head, and the published versions by id; the first record of an id counts.

    Raises StateUnavailable.
    """
    head, published = 0, dict[str, Published]()
    while page := await store.read(STREAM, after=head, limit=MAX_READ):
        for record in page:
            try:
                batch = msgspec.json.decode(record.data, type=_Batch)
            except msgspec.MsgspecError as error:
                raise StateUnavailable("read", str(error)) from error
            for one in batch.versions:
                published.setdefault(one.id, one)
        head = page[-1].number
    return head, published


@dataclass(eq=False)
class Publishing:
    """Publishes a gateway's prompt versions, and refuses changed ones."""

    versions: PromptVersions
    store: StateStore
    unix_time: Callable[[], float]
    _published: Mapping[str, Published] = field(default_factory=dict, init=False)

    def published_at(self, version_id: str) -> str | None:
        """Return when a version was published, in ISO 8601; ``None`` if not known."""
        known = self._published.get(version_id)
        return None if known is None else iso_time(known.published_at)

    async def publish(self) -> None:
        """Publish new versions. Raises PromptChanged if a published id now has another text."""
        hashes = {version.id: version.sha256 for version in self.versions.all}
        try:
            self._published = await publish_hashes(self.store, hashes, at=self.unix_time())
        except StateError as error:
            log = structlog.get_logger("gateway")
            log.warning("prompt versions not compared with what was published", reason=str(error))
            return
        self._refuse_changed()

    async def check(self) -> int:
        """Return how many versions of the folder are already published; publish nothing.

        Raises PromptChanged, StateUnavailable."""
        _, self._published = await read_published(self.store)
        self._refuse_changed()
        return sum(version.id in self._published for version in self.versions.all)

    def _refuse_changed(self) -> None:
        lines = []
        for version in self.versions.all:
            known = self._published.get(version.id)
            if known is not None and known.sha256 != version.sha256:
                lines.append(
                    f"{self.versions.file_of(version.id)}: id: given {version.id!r} with sha256 "
                    f"{version.sha256}, but it was published on {iso_time(known.published_at)} with sha256 "
                    f"{known.sha256}; a published version does not change: give the new text a new id, or "
                    "put the published text back"
                )
        if lines:
            raise PromptChanged("\n".join(lines))
