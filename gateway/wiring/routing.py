"""The part of the composition root that makes the routing's revisions and their desk."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from gateway.admin.routing import RoutingAdmin
from gateway.routing.check import KnownNames
from gateway.routing.projection import STREAM, RoutingProjection, Seed
from gateway.routing.revision import RoutingFileError, make_revision, read_routing
from gateway.state.audit import Audit
from gateway.wiring.state import StateParts
from observability.routing_metrics import RoutingCollector


@dataclass(frozen=True, slots=True)
class Routing:
    """The revisions and what stands around them.

    Args:
        book: the revision in force.
        desk: for operators.
        seed: what the routing file says.
    """

    book: RoutingProjection
    desk: RoutingAdmin
    seed: Seed

    def collector(self) -> RoutingCollector:
        """For the metrics."""
        return RoutingCollector(lambda: (self.book.head, self.book.behind is not None))

    @property
    def file_routes(self) -> Collection[str]:
        """Names of routes that always have a label of their own."""
        return () if self.seed.config is None else tuple(self.seed.config["routes"])


def make_routing(
    file: Path, state: StateParts, *, known: KnownNames, audit: Audit, unix_time: Callable[[], float]
) -> Routing:
    """Build it; a wrong file is an error only when the state has no revision."""
    seed = read_seed(file, known)
    book = RoutingProjection(state.store, known=known, seed=seed, unix_time=unix_time)
    book.follow(state.follow(STREAM, book.take))
    return Routing(book, RoutingAdmin(book, audit), seed)


def read_seed(file: Path, known: KnownNames) -> Seed:
    """The routing file, validated whole."""
    try:
        config = read_routing(file)
        make_revision(1, config, known, source=str(file))
    except RoutingFileError as error:
        return Seed(file.name, None, error)
    return Seed(file.name, config)
