"""One worker: its connections, its health, its load, and the loops that probe and scrape it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from adapters.values import Adapter
from gateway.backends.workers.client import Whole, WorkerClient
from gateway.backends.workers.dialect import Dialect
from gateway.backends.workers.errors import ConnectFailed, ConnectionLost, TimedOut, TransportError
from gateway.backends.workers.health import WorkerHealth, WorkerState
from gateway.backends.workers.in_service import WorkersInService
from gateway.backends.workers.inspection import (
    LACKS_V1,
    ServedModel,
    generates,
    lacks_v1,
    read_models,
    why_no_list,
)
from gateway.backends.workers.load import WorkerLoad, read_figures
from gateway.backends.workers.loras import MODELS_PATH, WorkerLoras
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_choice import WorkerView
from gateway.config.backends import OpenAIBackend
from observability.collectors import WorkerStatus

HEALTH_PATH, READY_PATH = "/health", "/ready"
# LiteLLM's `/health` sends a paid request to each of its models.
LITELLM_PATH, LITELLM_ANSWER = "/health/liveliness", b"alive"
# Connections for probe, scrape and inspection, which may coincide; separate from those for requests.
WATCH_CONNECTIONS = 3
# Longest time, in seconds, that a request whose connection broke waits for a probe's outcome; a dead worker
# refuses the probe's connection within a millisecond.
VERDICT_S = 0.25
# Time between two scrapes of a worker that answers 404, seconds: a hosted service has no such path.
NO_METRICS_S = 60.0
# Time without a byte, in probe timeouts, after which a request leaves a worker that answers no probe.
SILENT_PROBES = 5
NOT_PROBED = "has not answered yet"
NO_ANSWER = "does not answer"
NOT_READY = "is not ready yet"
RETURNING = "was out of service and is coming back"


class WorkerListener(Protocol):
    """Takes what a worker is found to be; the pool of workers does."""

    async def listed(self, url: str, models: Sequence[ServedModel] | None) -> str | None:
        """Take a worker's list of models; returns why the worker cannot be used, as the end of a sentence."""

    def checks(self, url: str) -> Mapping[str, TokenizerCheck]:
        """The checks of the worker's tokenizers, by model."""

    def detected(self, url: str, is_sluice: bool, same_tokenizer: Collection[str]) -> None:
        """Take what was detected; ``same_tokenizer``: the models that the worker tokenizes as the gateway."""


class Worker:
    """One worker.

    Args:
        make_client: takes a URL, the most connections, and the longest time to connect in seconds.
        lists_models: whether its list of models contains the adapters that it holds: vLLM's does, a Sluice's
            also contains what it could load.
        on_return: called with its URL when it returns to service: its cache may be empty.
        bring: makes an adapter's files available before it loads them; raises AdapterError.
    """

    def __init__(
        self,
        url: str,
        section: OpenAIBackend,
        *,
        make_client: Callable[[str, int, float], WorkerClient],
        dialect: Dialect,
        lists_models: bool,
        bring: Callable[[Adapter], Awaitable[None]],
        on_return: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.url = url
        connect_s = section.connect_timeout_seconds
        self.client = make_client(url, section.max_connections, connect_s)
        # The adapters that this gateway loads on it.
        self.loras = WorkerLoras(self.client, section, bring, clock) if section.load_adapters else None
        self._listed: frozenset[str] = frozenset()
        # The adapters that it last listed as its own.
        self.own_loras: Collection[str] = ()
        self.health = WorkerHealth(section)
        # Why it is not in service, as the end of a sentence.
        self.unavailable_reason = NOT_PROBED
        self.load = WorkerLoad(interval_s=section.metrics_interval_seconds, max_running=section.max_running)
        self.watcher = make_client(url, WATCH_CONNECTIONS, min(connect_s, section.probe_timeout_seconds))
        self._section = section
        self._clock = clock
        self._in_service: tuple[WorkersInService, ...] = ()
        self._on_return = on_return
        self._pool: WorkerListener | None = None
        self._unusable: str | None = None  # why its list of models makes it unusable
        self._is_sluice: bool | None = False
        self.generates = True  # until it is known that it does not
        self.refuses_probes = False
        self._detected = True
        self._logged: tuple[bool, set[str]] | None = None  # an ejected worker is detected at each probe
        self._lists_models = lists_models
        self._wake = asyncio.Event()
        self._probed = asyncio.Event()  # set at a probe's outcome; a new one for each probe
        # Readiness, not only liveness. The probe of a server without the path lists its models.
        own = READY_PATH if dialect is Dialect.SLUICE else LITELLM_PATH
        self._probe_path = section.probe_path or self.client.root + own
        self._log = structlog.get_logger("gateway.workers").bind(worker=url)

    def detect(self, pool: WorkerListener, *, kind: bool) -> None:
        """Detect for ``pool`` what the worker is before each return; ``kind``: whether it may be a Sluice."""
        self._pool = pool
        self._is_sluice = None if kind else False

    @property
    def serves_several(self) -> bool:
        """Whether it serves further models of the pool."""
        return len(self._in_service) > 1

    @property
    def _is_silent(self) -> bool:
        """Whether it is out of service and does not answer its probes."""
        return not self.health.in_service and self.unavailable_reason is NO_ANSWER

    @property
    def _none_in_service(self) -> bool:
        """Whether one of its models has no worker in service."""
        return any(not one.serving for one in self._in_service)

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
        if self._pool is None:
            return True
        try:
            answer = await self._models()
            lacks = answer.status == 404 and await lacks_v1(self.watcher, self._section.probe_timeout_seconds)
        except TransportError:
            return False
        listed = answer.read(read_models)
        if self._is_sluice is None and listed is not None and listed.of_sluice:
            self._is_sluice = True
            # A Sluice also lists adapters that it has not loaded.
            self._lists_models = False
            self._probe_path = self._section.probe_path or self.client.root + READY_PATH
        if answer.status == 429 or answer.status >= 500:
            # With a dialect and a model configured the list is not needed.
            return self._is_sluice is not None and self._section.model is not None
        reason = await self._pool.listed(self.url, None if listed is None else listed.data)
        if lacks:
            reason = LACKS_V1
        elif reason is not None and answer.status != 200:
            reason = why_no_list(answer.status)
        before, self._unusable = self._unusable, reason
        if reason is None:
            return True
        if reason != before:
            self._log.warning("worker not usable", reason=reason)
        self.unavailable_reason = reason
        if self.health.refused(self._clock()):
            self._left_service("another model")
        return False

    def view(self, now: float) -> WorkerView:
        requests, kv_usage = self.load.requests_and_kv_usage(now)
        return WorkerView(self.url, requests, kv_usage, self.health.weight(now), self.adapters)

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that it is known to hold, by its names of them."""
        known = self._listed | self.load.adapters
        return known if self.loras is None else known | self.loras.names

    def lost(self, name: str) -> None:
        self._listed -= {name}

    def status(self, now: float) -> WorkerStatus:
        load = self.load.current(now)
        return WorkerStatus(
            url=self.url,
            state=self.health.state.value,
            weight=round(self.health.weight(now), 3) if self.health.resting_until <= now else 0.0,
            in_flight=self.load.in_flight,
            connections=self.client.open,
            ejections=self.health.ejections,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            kv_usage=load.kv_usage if load else None,
        )

    def failed(self, *, last: bool) -> None:
        if self.health.failed(self._clock(), last=last):
            self._left_service("requests failed")

    async def broke(self, error: TransportError) -> None:
        """Eject a worker that refused a request's connection; probe at once a worker whose connection broke.

        Waits at most ``VERDICT_S`` for the outcome of the probe.
        """
        if isinstance(error, ConnectFailed) and error.refused:
            self.end("refuses connections")
        elif isinstance(error, ConnectionLost):
            self._wake.set()
            # Requests that break together share one probe.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_S):
                    await self._probed.wait()

    async def run(self) -> None:
        """Probe and scrape until cancelled; closes every connection then."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._probe_forever(), name=f"probe {self.url}")
                if (path := self._section.metrics_path) is not None:
                    loops.create_task(self._scrape_forever(path), name=f"scrape {self.url}")
        finally:
            self.client.close()
            self.watcher.close()

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
            elif self.health.first_probes_failed and self._unusable is None:
                self._log.warning("worker not in service", reason=self.unavailable_reason)
            if not good and self._is_silent and not self._none_in_service:
                self.client.give_up(SILENT_PROBES * self._section.probe_timeout_seconds)
            probed, self._probed = self._probed, asyncio.Event()
            probed.set()
            if good and self._lists_models:
                await self._list()
            await self._sleep(now)

    async def _sleep(self, now: float) -> None:
        """Sleep until the next probe: its time, the end of an ejection, or a wake-up."""
        wait_s, back_s = self._section.probe_interval_seconds, self.health.returns_in(now)
        if self._none_in_service:
            wait_s = min(wait_s, *(one.outage_probe_s for one in self._in_service))
        elif back_s > 0.0:
            wait_s = min(wait_s, back_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    async def _probe(self) -> bool:
        root, began_at = self.client.root, asyncio.get_running_loop().time()
        try:
            answer = await self._get(self._probe_path)
            other = answer.status < 500 and LITELLM_ANSWER not in answer.body
            if other and self._probe_path == root + LITELLM_PATH != self._section.probe_path:
                self._probe_path = root + HEALTH_PATH
                answer = await self._get(self._probe_path)
            if answer.status == 404 and self._probe_path != (models := self.client.prefix + MODELS_PATH):
                self._probe_path = models
                answer = await self._get(models)
        except TransportError as error:
            # A busy worker may be late for a probe while it sends answers: it is not gone.
            if isinstance(error, TimedOut) and self.health.in_service and self.client.heard_since(began_at):
                return True
            self.unavailable_reason = NO_ANSWER
            if isinstance(error, ConnectFailed) and error.refused:
                self.end("refuses connections")
            return False
        # A server that refuses the probe's key, or throttles it, is alive; requests show what they get.
        self.refuses_probes = answer.status in (401, 403)
        good = answer.status < 400 or self.refuses_probes or answer.status == 429
        if self._section.dialect == "openai" and not self._section.probe_path:
            # A hosted service may have neither a path for probes nor a list of models.
            good |= answer.status in (404, 405)
        if not good:
            self.unavailable_reason = (
                NOT_READY if answer.status == 503 else f"answers its probe with {answer.status}"
            )
        elif not self.health.in_service:  # it comes into service in a moment, or when its ejection ends
            ejected = self.health.state is WorkerState.EJECTED
            self.unavailable_reason = self._unusable or (RETURNING if ejected else NOT_READY)
        return good

    async def _detect(self) -> bool:
        """Detect its kind, models and tokenizers; false if it does not list them in time, is not ready, or
        serves other models. A tokenizer that it has not reported counts as different.
        """
        pool, timeout_s = self._pool, self._section.probe_timeout_seconds
        if pool is None:
            return True
        first, same = self._is_sluice is None, set[str]()
        if not await self.follow():
            return False
        is_sluice_now = self._is_sluice is True
        self._detected = True
        try:
            self.generates = is_sluice_now or await generates(self.watcher, timeout_s)
        except TransportError:
            self._detected = False
        for model, check in pool.checks(self.url).items():
            if check.reasons and not is_sluice_now:
                continue
            try:
                if await check.passes(self.watcher, model, timeout_s):
                    same.add(model)
            except TransportError:
                self._detected = False
                break
        if self._logged != (is_sluice_now, same):
            self._logged = is_sluice_now, same
            self._log.info("worker detected", sluice=is_sluice_now, same_tokenizer=sorted(same))
        pool.detected(self.url, is_sluice_now, same)
        return await self._probe() if first and is_sluice_now else True

    def end(self, reason: str) -> None:
        """Eject the worker at once: it cannot answer until it has restarted."""
        self.unavailable_reason = reason
        if self.health.refused(self._clock()):
            self._left_service(reason)

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
            listed = (await self._models()).read(read_models)
        except TransportError:
            return
        if listed is None:
            return
        self._listed = listed.names
        if self.loras is not None:
            self.loras.update(listed.names, changes)

    def _models(self) -> Awaitable[Whole]:
        return self._get(self.client.prefix + MODELS_PATH)

    def _get(self, path: str) -> Awaitable[Whole]:
        return self.watcher.get(path, timeout_s=self._section.probe_timeout_seconds)

    async def _scrape_forever(self, path: str) -> None:
        interval_s = pause_s = self._section.metrics_interval_seconds
        while True:
            with contextlib.suppress(TransportError):
                answer = await self._get(path)
                pause_s = NO_METRICS_S if answer.status == 404 else interval_s
                figures = read_figures(answer.body.decode(errors="replace")) if answer.status == 200 else None
                if figures is not None:
                    self.load.scraped(figures, self._clock())
            await asyncio.sleep(pause_s)
