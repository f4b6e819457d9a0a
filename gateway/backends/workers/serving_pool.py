"""The workers of one backend of the configuration, and the models that they serve."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set

from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.inspection import ServedModel, offers_of
from gateway.backends.workers.loras import WorkerLoras, own_loras
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker import Worker
from gateway.contracts.features import Feature
from observability.collectors import WorkerStatus


class ServingPool:
    """Probes the workers of a pool, and has a :class:`WorkersBackend` for each model that they list.

    A backend has the pool's name while it is the only one, else that name, a slash and the model's id.
    Without a configured model the pool starts with one backend, which becomes that of the first listed model.

    Args:
        configured: the model's id; ``None``: the pool serves the models that the workers list.
        make: makes the backend of a model on all workers.
        changed: called with the pool when its models, their names or the workers' own adapters have changed,
            and with the models that are gone.
        background: runs as long as the pool, such as the periodic reading of its key's file.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        configured: str | None,
        *,
        make: Callable[[str], WorkersBackend],
        changed: Callable[["ServingPool", Set[str]], None],
        background: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.configured = configured
        self._workers = {worker.url: worker for worker in workers}
        self._make = make
        self._changed = changed
        self._background = background
        self._clock = clock
        # The models and their backends, in the order of their names.
        self.serving: tuple[WorkersBackend, ...] = (make(configured or name),)
        self._listed: dict[str, Mapping[str, ServedModel]] = {}  # by worker URL, so bounded by their number
        self._loras: dict[str, Mapping[str, str]] = {}  # by worker URL: the model of each of its own adapters
        self._is_sluice: dict[str, bool] = {}
        self._one_at_a_time = asyncio.Lock()
        for worker in workers:
            worker.serve([self.serving[0].in_service])

    async def listed(self, url: str, models: Sequence[ServedModel] | None) -> str | None:
        async with self._one_at_a_time:
            offered = offers_of(models, self.configured)
            if offered is None:
                return None
            reason = offered if isinstance(offered, str) else None
            self._listed[url] = {} if isinstance(offered, str) else {one.id: one for one in offered}
            usable = reason is None and Feature.LORA in self.serving[0].features
            own = own_loras(models or (), tuple(self._listed[url].values())) if usable else {}
            same = own == self._loras.get(url, {})
            self._loras[url] = own
            self._workers[url].own_loras = own.keys()
            if self.configured is not None:
                for found in self._listed[url].values():
                    await self.serving[0].listed(url, found)
            else:
                await self._regroup(url)
            if not same:
                self._changed(self, set())
            return reason

    def loras_of(self, backend: WorkersBackend) -> Set[str]:
        """The adapters of the backend's model that workers list as their own."""
        return {name for own in self._loras.values() for name, model in own.items() if model == backend.model}

    async def _regroup(self, url: str) -> None:
        """Give each listed model a backend; stop a backend whose model is gone: its prompts are for it."""
        before = [(one.name, one.model) for one in self.serving]
        listed = {model for found in self._listed.values() for model in found}
        serving = {one.model: one for one in self.serving if one.model in listed}
        unknown = [one for one in self.serving if not one.known]
        for model, found in self._listed[url].items():
            if model not in serving:
                serving[model] = unknown.pop() if unknown else self._made(model)
            await serving[model].listed(url, found)
        if not serving:  # the pool always has a backend
            serving[self.serving[0].model] = self.serving[0]
        for one in self.serving:
            if one not in serving.values():
                one.serve_by(())
                one.stop()
        self.serving = tuple(serving[model] for model in sorted(serving))
        for one in self.serving:
            one.rename(self.name if len(serving) == 1 else f"{self.name}/{one.model}")
            one.serve_by([worker for worker in self._workers.values() if one in self._of(worker.url)])
        for worker in self._workers.values():
            worker.serve([one.in_service for one in self._of(worker.url)])
        if before != [(one.name, one.model) for one in self.serving]:
            self._workers[url].detect_again()
            self._changed(self, {model for _, model in before} - serving.keys())

    def _made(self, model: str) -> WorkersBackend:
        made = self._make(model)
        for url, is_sluice in self._is_sluice.items():
            made.detected(url, is_sluice, same_tokenizer=False)
        return made

    def _of(self, url: str) -> Sequence[WorkersBackend]:
        """The backends that a worker serves: all of them until the worker lists its models."""
        listed = self._listed.get(url)
        if listed is None or self.configured is not None or not any(self._listed.values()):
            return self.serving
        return [one for one in self.serving if one.model in listed]

    def checks(self, url: str) -> Mapping[str, TokenizerCheck]:
        return {one.model: one.check for one in self._of(url) if one.check is not None}

    def detected(self, url: str, is_sluice: bool, same_tokenizer: Collection[str]) -> None:
        self._is_sluice[url] = is_sluice
        for one in self._of(url):
            one.detected(url, is_sluice, same_tokenizer=one.model in same_tokenizer)

    async def follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(worker.follow(), name=f"models {worker.url}")

    def loras(self) -> list[WorkerLoras]:
        """The loader of each worker in service on which this gateway loads adapters."""
        serving = (worker.loras for worker in self._workers.values() if worker.health.in_service)
        return [one for one in serving if one is not None]

    def status(self) -> tuple[WorkerStatus, ...]:
        now = self._clock()
        return tuple([worker.status(now) for worker in self._workers.values()])

    def counted(self) -> dict[str, tuple[int, int]]:
        """Prompt and generated tokens since the worker's start, for each worker that reports them."""
        counts = {worker.url: worker.load.counted for worker in self._workers.values()}
        return {url: tokens for url, tokens in counts.items() if tokens is not None}

    async def run(self) -> None:
        """Probe and scrape every worker until cancelled; closes every connection then."""
        try:
            async with asyncio.TaskGroup() as loops:
                for worker in self._workers.values():
                    loops.create_task(worker.run(), name=f"worker {worker.url}")
                await self._background()
        finally:
            for one in self.serving:
                one.stop()
