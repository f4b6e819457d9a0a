"""Counts this process's requests of a canary and its baseline by window.

A session counts once per window: traffic is split by session, and a session's requests may fail together, so
they are not independent evidence. Of 200 simulated good canaries, one in ten was rolled back when two
requests always failed together, and nearly all when five did.
"""

from collections.abc import Callable, Collection, Mapping

from gateway.routing.canary import CanaryPlan, Counts
from gateway.routing.evidence import EvidenceWindow
from gateway.routing.revision import Route
from observability.events import DISCONNECTED, RequestRecord

MAX_WINDOWS = 16  # windows that are stored while they cannot be published; the oldest is dropped first
MAX_EXAMINED = 100
"""Most answers per side and window whose content is checked: a sample, as a check takes a millisecond."""
MAX_SESSIONS = 100_000  # most sessions of a window; requests of further sessions do not count


class CanaryTally:
    """Counts finished requests of the route that a canary runs on.

    Args:
        route: returns the route in force of a name, or ``None``.
        unix_time: seconds since 1970; it makes windows the same in every process.
        models_of: the backends of each pool of several models, which are drawn in the pool's place; may
            change.
    """

    def __init__(
        self,
        route: Callable[[str], Route | None],
        unix_time: Callable[[], float],
        models_of: Mapping[str, Collection[str]],
    ) -> None:
        self._route = route
        self._unix_time = unix_time
        self._models_of = models_of
        self._plan: CanaryPlan | None = None
        self._windows: dict[int, dict[str, EvidenceWindow]] = {}
        self._met: dict[int, set[int]] = {}
        # Of the current window: its number, the checked answers of each side, and their sessions.
        self._examined: tuple[int, dict[bool, int], set[int]] = (0, {}, set())

    def watch(self, plan: CanaryPlan | None) -> None:
        """Count requests for this canary from now on; ``None``: count nothing."""
        if plan is None or self._plan is None or plan.id != self._plan.id:
            self._windows.clear()
            self._met.clear()
        self._plan = plan

    def observe(self, record: RequestRecord) -> None:
        """Count a request; one whose caller named the backend, or without a drawn backend, does not count."""
        plan = self._plan
        if plan is None or record.route != plan.route or record.drawn is None:
            return
        route = self._route(plan.route)
        if route is None:
            return
        canary = self._of_canary(plan, record.drawn)
        slo = route.config.slo
        found = outcomes(record, ttft_slo_ms=slo.ttft_ms, total_slo_ms=slo.total_ms)
        number = int(self._unix_time() // plan.window_s)
        met = self._met.setdefault(number, set())
        if not found or record.session in met or len(met) >= MAX_SESSIONS:
            return
        if record.session is not None:
            met.add(record.session)
        window = self._windows.setdefault(number, {})
        for check, bad in found:
            self._count(window, check, bad=bad, canary=canary)
        for entries in (self._windows, self._met):
            while len(entries) > MAX_WINDOWS:
                del entries[min(entries)]

    def samples(self, route: str, drawn: str, session: int | None) -> str | None:
        """Return the id of the canary for which to check this answer's content; ``None`` for no check."""
        plan = self._plan
        if plan is None or route != plan.route or not plan.guardrails:
            return None
        number = int(self._unix_time() // plan.window_s)
        if self._examined[0] != number:
            self._examined = (number, {True: 0, False: 0}, set())
        _, counts, sessions = self._examined
        side = self._of_canary(plan, drawn)
        if counts[side] >= MAX_EXAMINED or session in sessions:
            return None
        counts[side] += 1
        if session is not None:
            sessions.add(session)
        return plan.id

    def examined(self, canary: str, drawn: str, results: Mapping[str, bool | None]) -> None:
        """Count an answer's check results in the current window; a result is ``None`` if not applicable."""
        plan = self._plan
        if plan is None or plan.id != canary:
            return
        window = self._windows.setdefault(int(self._unix_time() // plan.window_s), {})
        side = self._of_canary(plan, drawn)
        for name, passed in results.items():
            if passed is not None and name in plan.guardrails:
                self._count(window, f"guardrail.{name}", bad=not passed, canary=side)

    def _of_canary(self, plan: CanaryPlan, drawn: str) -> bool:
        return drawn == plan.backend or drawn in self._models_of.get(plan.backend, ())

    @staticmethod
    def _count(window: dict[str, EvidenceWindow], check: str, *, bad: bool, canary: bool) -> None:
        one = EvidenceWindow(bad, 1, 0, 0) if canary else EvidenceWindow(0, 0, bad, 1)
        window[check] = window.get(check, EvidenceWindow()) + one

    def take(self) -> list[tuple[int, Counts]]:
        """Remove and return the finished windows, oldest first."""
        if self._plan is None:
            return []
        now = int(self._unix_time() // self._plan.window_s)
        for number in [number for number in self._met if number < now]:
            del self._met[number]
        return [(number, self._windows.pop(number)) for number in sorted(self._windows) if number < now]


def outcomes(record: RequestRecord, *, ttft_slo_ms: float, total_slo_ms: float) -> list[tuple[str, bool]]:
    """Return the checks for which a request counts: the check's name, and whether the request was bad.

    An error of the caller, or a caller over its limits (429), counts for no check. Neither does a refused try
    of a batch's line: the line runs again on the same backend, so its tries are not independent. A caller
    that disconnected counts only as late, if it had waited too long. If another backend or none answered, the
    speed and quality of the drawn one are unknown.
    """
    late_first = (record.total_ms if record.ttft_ms is None else record.ttft_ms) > ttft_slo_ms
    late = record.total_ms > total_slo_ms
    if record.status == DISCONNECTED:  # only its waiting time is evidence
        return [(check, True) for check, is_late in (("ttft", late_first), ("total", late)) if is_late]
    if record.status >= 400 and (record.runs_again or not record.failed):
        return []
    found = [("error", record.failed)]
    if record.failed:
        return found
    elsewhere = record.fallback_kind is not None or record.backend_name != record.drawn
    found.append(("fallback", elsewhere))
    if not elsewhere:
        if record.ttft_ms is not None:
            found.append(("ttft", late_first))
        found.append(("total", late))
    return found
