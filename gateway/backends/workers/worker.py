"""One worker: its connections, its health, its load, and the loops that probe and scrape it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from gateway.backends.workers.client import Timeouts, WorkerClient
from gateway.backends.workers.errors import ConnectFailed, ConnectionLost, TransportError
from gateway.backends.workers.health import HealthRules, WorkerHealth, WorkerState
from gateway.backends.workers.in_service import WorkersInService
from gateway.backends.workers.inspection import (
    Inspection,
    ServedModel,
    generates,
    inspect,
    list_of,
    why_no_list,
)
from gateway.backends.workers.load import WorkerLoad, read_figures
from gateway.backends.workers.loras import MODELS_PATH, WorkerLoras
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_choice import WorkerView
from observability.collectors import WorkerStatus

# Connections for probe, scrape and inspection, which may coincide; separate from those for requests.
WATCH_CONNECTIONS = 3
# Longest time, in seconds, that a request whose connection broke waits for a probe's outcome; a dead worker
# refuses the probe's connection within a millisecond.
VERDICT_S = 0.25
# Time between two scrapes of a worker that answers 404, seconds: a hosted service has no such path.
NO_METRICS_S = 60.0
NOT_PROBED = "has not answered yet"
NOT_READY = "is not ready yet"


@dataclass(frozen=True, slots=True)
class WatchRules:
    """How a worker is probed and scraped.

    Args:
        probe_path: from the server's root; where it is 404, ``/models`` is used instead.
        probe_interval_s: time between two probes, seconds.
        probe_timeout_s: longest time for one, and for a scrape, seconds.
        metrics_path: from the server's root; ``None``: no scrapes.
        metrics_interval_s: time between two scrapes, seconds.
        lists_models: whether its list of models contains the adapters that it holds.
        sluice_probe_path: replaces ``probe_path`` once the worker is detected to be a Sluice.
    """

    probe_path: str = "/health"
    probe_interval_s: float = 2.0
    probe_timeout_s: float = 2.0
    metrics_path: str | None = "/metrics"
    metrics_interval_s: float = 1.0
    lists_models: bool = False
    sluice_probe_path: str = "/ready"


OnListed = Callable[[str, Sequence[ServedModel] | None], Awaitable[str | None]]


# Tokenizer checks by model, for models whose prompts may be sent as token ids.
Checks = Mapping[str, TokenizerCheck]
OnDetected = Callable[[str, bool, Collection[str]], None]


class Worker:
    """One worker.

    Args:
        timeouts: limits of a request's exchange.
        max_connections: most connections for requests.
        max_running: most sequences in its batch; 0 when unknown.
        on_return: called with its URL when it returns to service: its cache may be empty.
        make_loras: makes the loader of its adapters; ``None``: the gateway loads none.
    """

    def __init__(
        self,
        url: str,
        *,
        make_client: Callable[[str, Timeouts, int], WorkerClient],
        timeouts: Timeouts,
        max_connections: int,
        rules: HealthRules,
        watch: WatchRules,
        max_running: int,
        clock: Callable[[], float],
        on_return: Callable[[str], None],
        make_loras: Callable[[WorkerClient], WorkerLoras] | None = None,
    ) -> None:
        self.url = url
        self.client = make_client(url, timeouts, max_connections)
        self.loras = make_loras(self.client) if make_loras is not None else None
        self._listed: frozenset[str] = frozenset()
        # The adapters that it last listed as its own.
        self.own_loras: Collection[str] = ()
        self.health = WorkerHealth(rules)
        # Why it is not in service, as the end of a sentence.
        self.unavailable_reason = NOT_PROBED
        self.load = WorkerLoad(interval_s=watch.metrics_interval_s, max_running=max_running)
        self._watcher = make_client(
            url,
            replace(timeouts, connect_s=min(timeouts.connect_s, watch.probe_timeout_s)),
            WATCH_CONNECTIONS,
        )
        self._watch = watch
        self._clock = clock
        self._in_service: tuple[WorkersInService, ...] = ()
        self._on_return = on_return
        self._on_detected: OnDetected | None = None
        self._on_listed: OnListed | None = None
        self._unusable: str | None = None  # why its list of models makes it unusable
        self._checks: Callable[[str], Checks] = lambda url: {}
        self._is_sluice: bool | None = False
        self.generates = True  # until it is known that it does not
        self._detected = True
        self._lists_models = watch.lists_models
        self._wake = asyncio.Event()
        self._probed = asyncio.Event()  # set at a probe's outcome; a new one for each probe
        self._probe_path = watch.probe_path
        self._no_metrics = False
        self._log = structlog.get_logger("gateway.workers").bind(worker=url)

    def detect(
        self,
        on_detected: OnDetected,
        on_listed: OnListed,
        checks: Callable[[str], Checks],
        *,
        kind: bool,
    ) -> None:
        """Detect what the worker is before each return to service.

        Args:
            on_detected: gets its URL, whether it is a Sluice, and the models whose check it passed.
            on_listed: gets its URL and the models that it lists, ``None`` if it has no list; returns why it
                cannot be used, or ``None``.
            checks: returns the checks of its tokenizers, by its URL.
            kind: whether it may be a Sluice.
        """
        self._on_detected = on_detected
        self._on_listed = on_listed
        self._checks = checks
        self._is_sluice = None if kind else False

    @property
    def _none_in_service(self) -> bool:
        """Whether one of its models has no worker in service."""
        return any(one.none for one in self._in_service)

    def serve(self, in_service: Sequence[WorkersInService]) -> None:
        """Replace the sets of workers in service that it belongs to: one for each model that it serves."""
        for one in self._in_service:
            if one not in in_service:
                one.leave_pool(self.url)
        for one in in_service:
            one.join_pool(self.url, self._wake.set)
            if self.health.in_service:
                one.add(self.url)
        self._in_service = tuple(in_service)

    def detect_again(self) -> None:
        """Ask for its models and tokenizers at once, since it said that it lacks a model or lists another."""
        self._detected = False
        self._wake.set()

    async def follow(self) -> bool:
        """Ask for its models; returns whether it can be used. With only other models it leaves service."""
        if self._on_listed is None:
            return True
        try:
            answer = await self._watcher.get(
                self.client.prefix + MODELS_PATH, timeout_s=self._watch.probe_timeout_s
            )
        except TransportError:
            return False
        listed = list_of(answer)
        if self._is_sluice is None and listed is not None and listed.of_sluice:
            self._is_sluice = True
            # A Sluice also lists adapters that it has not loaded.
            self._lists_models = False
            self._probe_path = self._watch.sluice_probe_path
        if answer.status >= 500:
            return False
        reason = await self._on_listed(self.url, None if listed is None else listed.data)
        before, self._unusable = self._unusable, reason
        if reason is None:
            return True
        if answer.status != 200:
            self._unusable = reason = why_no_list(answer.status)
        if reason != before:
            self._log.warning("worker not usable", reason=reason)
        self.unavailable_reason = reason
        if self.health.refused(self._clock()):
            self._left_service("another model")
        return False

    def view(self, now: float) -> WorkerView:
        """The worker's figures for :class:`WorkerChoice`."""
        requests, kv_usage = self.load.requests_and_kv_usage(now)
        return WorkerView(self.url, requests, kv_usage, self.health.weight(now), self.adapters)

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that it is known to hold, by its names of them."""
        known = self._listed | self.load.adapters
        return known if self.loras is None else known | self.loras.names

    def lost(self, name: str) -> None:
        """Record that it does not have this adapter."""
        self._listed -= {name}

    async def inspect(
        self, model: str | None, *, sample_ids: Sequence[int] | None, max_model_len: int, generate: bool
    ) -> Inspection:
        """Ask what it serves; raises nothing."""
        return await inspect(
            self._watcher, self.url, model,
            sample_ids=sample_ids, max_model_len=max_model_len, generate=generate,
        )  # fmt: skip

    def status(self, now: float) -> WorkerStatus:
        """The worker's state for operators."""
        load = self.load.current(now)
        return WorkerStatus(
            url=self.url,
            state=self.health.state.value,
            weight=round(self.health.weight(now), 3),
            in_flight=self.load.in_flight,
            connections=self.client.open,
            ejections=self.health.ejections,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            kv_usage=load.kv_usage if load else None,
        )

    def failed(self, *, last: bool) -> None:
        """Record a request that failed because of this worker."""
        if self.health.failed(self._clock(), last=last):
            self._left_service("requests failed")

    async def broke(self, error: TransportError) -> None:
        """Eject a worker that refused a request's connection; probe at once a worker whose connection broke.

        Waits at most ``VERDICT_S`` for the outcome of the probe.
        """
        if isinstance(error, ConnectFailed):
            if error.refused:
                self._refused()
            return
        if not isinstance(error, ConnectionLost):
            return
        self._wake.set()
        # Requests that break together share one probe.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_S):
                await self._probed.wait()

    def succeeded(self) -> None:
        """Record a request that was answered."""
        self.health.succeeded(self._clock())

    async def run(self) -> None:
        """Probe and scrape until cancelled; closes every connection then."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._probe_forever(), name=f"probe {self.url}")
                if self._watch.metrics_path is not None:
                    loops.create_task(
                        self._scrape_forever(self._watch.metrics_path), name=f"scrape {self.url}"
                    )
        finally:
            self.client.close()
            self._watcher.close()

    async def _probe_forever(self) -> None:
        while True:
            self._wake.clear()
            good = await self._probe()
            if good and not (self.health.in_service and self._detected):
                good = await self._detect()
            now = self._clock()
            if good and self.health.probe_succeeded(now, alone=self._none_in_service):
                self._log.info("worker in service")
                self._returned()
            elif not good and self.health.probe_failed(now):
                self._left_service("probes failed")
            probed, self._probed = self._probed, asyncio.Event()
            probed.set()
            if good and self._lists_models:
                await self._list()
            await self._sleep(now)

    async def _sleep(self, now: float) -> None:
        """Sleep until the next probe: its time, the end of an ejection, or a wake-up."""
        wait_s, back_s = self._watch.probe_interval_s, self.health.returns_in(now)
        if self._none_in_service:
            wait_s = min(wait_s, *(one.outage_probe_s for one in self._in_service))
        elif back_s > 0.0:
            wait_s = min(wait_s, back_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    async def _probe(self) -> bool:
        timeout_s = self._watch.probe_timeout_s
        try:
            answer = await self._watcher.get(self._probe_path, timeout_s=timeout_s)
            if answer.status == 404 and self._probe_path != (models := self.client.prefix + MODELS_PATH):
                self._probe_path = models
                answer = await self._watcher.get(self._probe_path, timeout_s=timeout_s)
        except TransportError as error:
            self.unavailable_reason = "does not answer"
            if isinstance(error, ConnectFailed) and error.refused:
                self._refused()
            return False
        # A server that refuses the probe's key is alive; requests show whether theirs is valid.
        good = answer.status < 400 or answer.status in (401, 403)
        if not good:
            self.unavailable_reason = (
                NOT_READY if answer.status == 503 else f"answers its probe with {answer.status}"
            )
        elif not self.health.in_service:  # it comes into service in a moment, or when its ejection ends
            ejected = self.health.state is WorkerState.EJECTED
            self.unavailable_reason = self._unusable or ("failed too many requests" if ejected else NOT_READY)
        return good

    async def _detect(self) -> bool:
        """Detect its kind, models and tokenizers; false if it does not list them in time, is not ready, or
        serves other models. A tokenizer that it has not reported counts as different.
        """
        on_detected, timeout_s = self._on_detected, self._watch.probe_timeout_s
        if on_detected is None:
            return True
        first, same = self._is_sluice is None, set[str]()
        if not await self.follow():
            return False
        is_sluice_now = self._is_sluice is True
        self._detected = True
        try:
            self.generates = is_sluice_now or await generates(self._watcher, timeout_s)
        except TransportError:
            self._detected = False
        for model, check in self._checks(self.url).items():
            if check.reasons and not is_sluice_now:
                continue
            try:
                if await check.passes(self._watcher, model, timeout_s):
                    same.add(model)
            except TransportError:
                self._detected = False
                break
        self._log.info("worker detected", sluice=is_sluice_now, same_tokenizer=sorted(same))
        on_detected(self.url, is_sluice_now, same)
        return await self._probe() if first and is_sluice_now else True

    def _refused(self) -> None:
        self.unavailable_reason = "refuses connections"
        if self.health.refused(self._clock()):
            self._left_service("connection refused")

    def _left_service(self, reason: str) -> None:
        self._log.warning("worker ejected", reason=reason, ejections=self.health.ejections)
        for one in self._in_service:
            one.remove(self.url)

    def _returned(self) -> None:
        for one in self._in_service:
            one.add(self.url)
        self._listed = frozenset()
        if self.loras is not None:
            self.loras.forget()
        self._on_return(self.url)

    async def _list(self) -> None:
        changes = self.loras.changes if self.loras is not None else 0
        try:
            answer = await self._watcher.get(
                self.client.prefix + MODELS_PATH, timeout_s=self._watch.probe_timeout_s
            )
        except TransportError:
            return
        listed = list_of(answer)
        if listed is None:
            return
        self._listed = listed.names
        if self.loras is not None:
            self.loras.update(listed.names, changes)

    async def _scrape_forever(self, path: str) -> None:
        while True:
            await self._scrape(path)
            await asyncio.sleep(NO_METRICS_S if self._no_metrics else self._watch.metrics_interval_s)

    async def _scrape(self, path: str) -> None:
        try:
            answer = await self._watcher.get(path, timeout_s=self._watch.probe_timeout_s)
        except TransportError:
            return
        self._no_metrics = answer.status == 404
        if answer.status == 200:
            figures = read_figures(answer.body.decode(errors="replace"))
            if figures is not None:
                self.load.scraped(figures, self._clock())
