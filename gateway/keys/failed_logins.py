"""Limits the wrong keys of an address per minute; above the limit a wrong key gets 429."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import structlog

from accounting.events import LoginFailed
from gateway.contracts.addresses import Network, source_of
from gateway.errors import RateLimited

# The most wrong keys of an address per minute. A client that retries a mistyped key each second is allowed.
MAX_FAILED = 60
WINDOW_S = 60.0
MAX_ADDRESSES = 4_096  # the most addresses that are remembered, the most recent ones: about 1 MB


@dataclass(eq=False, kw_only=True)
class FailedLogins:
    """Counts wrong keys by address. A valid key is never refused here, whatever its address.

    ``proxies``: addresses that are never refused, because each stands for many callers.
    """

    clock: Callable[[], float] = time.monotonic
    proxies: Sequence[Network] = ()
    emit: Callable[[LoginFailed], None] = lambda event: None

    def __post_init__(self) -> None:
        # By address: the start of its minute, and the number of wrong keys since then.
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._quiet_until = float("-inf")
        self._log = structlog.get_logger("keys")

    def failed(self, address: str) -> None:
        """Count a wrong key of this address. Raises RateLimited if it has sent too many in this minute."""
        source, now = source_of(address, self.proxies), self.clock()
        since, count = self._counts.get(source, (now, 0))
        if now - since >= WINDOW_S:
            since, count = now, 0
        throttled = bool(source) and count >= MAX_FAILED
        self.emit(LoginFailed(throttled))
        if throttled:
            if now >= self._quiet_until:
                self._quiet_until = now + WINDOW_S
                self._log.warning(
                    "too many wrong keys from an address", address=source, per_minute=MAX_FAILED
                )
            wait_s = since + WINDOW_S - now
            raise RateLimited(
                f"more than {MAX_FAILED} wrong keys came from this address within a minute; "
                f"a valid key is served, a wrong one is judged again in {ceil(wait_s)} s",
                retry_after_ms=max(1, ceil(wait_s * 1000)),
            )
        if source:
            self._counts[source] = since, count + 1
            self._counts.move_to_end(source)
            if len(self._counts) > MAX_ADDRESSES:
                self._counts.popitem(last=False)
