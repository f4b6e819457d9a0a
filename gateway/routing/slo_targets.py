"""The service levels of the routes in force, as the metrics read them."""

from collections.abc import Callable, Mapping

from gateway.routing.revision import Revision
from observability.slo_metrics import NO_TARGETS, SloTargets


class RevisionTargets:
    """The targets of each route, computed once per revision; ``revision`` returns the one in force."""

    def __init__(self, revision: Callable[[], Revision]) -> None:
        self._revision = revision
        self._of: Revision | None = None
        self._targets = NO_TARGETS

    def __call__(self) -> Mapping[str, SloTargets]:
        """Return the targets by route."""
        revision = self._revision()
        if revision is not self._of:
            self._targets = {
                name: SloTargets(route.ttft_slo_ms, route.total_slo_ms)
                for name, route in revision.routes.items()
            }
            self._of = revision
        return self._targets
