"""The adapters that this gateway loads on one running worker, by vLLM's own endpoints.

An adapter's name on the worker is unique to its content: vLLM finds cached prefixes by that name, so a reused
name would give answers computed with old weights. All gateways make the same names. :class:`LoraSlots` does
the bookkeeping, as for an engine in process; the worker is the holder.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePath

import orjson
import structlog

from adapters.values import Adapter
from engine import errors
from gateway.backends.lora_slots import LoraSlots
from gateway.backends.workers.client import WorkerClient, whole_body
from gateway.backends.workers.errors import TransportError
from gateway.backends.workers.inspection import ServedModel, read_models
from gateway.backends.workers.refusal import failure_of_transport, refusal_of
from gateway.config.backends import OpenAIBackend

LOAD_PATH, UNLOAD_PATH, MODELS_PATH = "/load_lora_adapter", "/unload_lora_adapter", "/models"
MAX_ANSWER_BYTES = 64 * 1024  # longest answer of these endpoints that is read, bytes
LIST_TIMEOUT_S = 10.0  # long, since a worker that loads an adapter answers late
# Characters of a worker's error message in the log.
MAX_WORDS = 300
_LOADED_NAME = re.compile(r"@[0-9a-f]{12}$")  # end of a loaded_name


def path_at_worker(adapter: Adapter, folder: str | None) -> str:
    """The path of the adapter's files on the worker, where ``folder`` is the gateway's adapter folder."""
    return adapter.path if folder is None else f"{folder.rstrip('/')}/{PurePath(adapter.path).name}"


def loaded_name(adapter: Adapter, folder: str | None) -> str:
    """The worker's name of these weights; the path identifies them, since it ends in their SHA-256."""
    place = path_at_worker(adapter, folder).encode()
    return f"{adapter.adapter_id}@{hashlib.blake2b(place, digest_size=6).hexdigest()}"


def own_loras(models: Sequence[ServedModel], offered: Sequence[ServedModel]) -> Mapping[str, str]:
    """The LoRA adapters that a worker lists as its own, with the id of their model among ``offered``.

    Adapters that a gateway has loaded there, named by :func:`loaded_name`, are left out. So are the backends
    and aliases of a Sluice: it lists them with a parent too, but their root is another name.
    """
    roots = {one.id: one.root or one.id for one in models if one.parent is None}
    bases = {one.root or one.id: one.id for one in offered}
    return {
        one.id: bases[root]
        for one in models
        if one.parent is not None
        and (root := roots.get(one.parent, one.parent)) in bases
        and not _LOADED_NAME.search(one.id)
        and (one.owned_by != "sluice" or one.root == one.id)
    }


class WorkerLoras:
    """The adapters that this gateway has loaded on one worker. Lives on the event loop.

    The worker as an :class:`~gateway.backends.lora_slots.AdapterHolder`, and its slots. The section's
    ``adapters`` are configured at the worker, and never loaded by this gateway.

    Args:
        bring: makes an adapter's files available; raises AdapterError.
    """

    def __init__(
        self,
        client: WorkerClient,
        section: OpenAIBackend,
        bring: Callable[[Adapter], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.places = section.max_loaded_adapters
        # Grows when a load or unload begins and when it ends.
        self.changes = 0
        self._client = client
        self._fixed = section.adapters.keys()
        self._folder = section.adapters_folder
        self._slots = LoraSlots(self, self.places, bring=bring, clock=clock)
        self._loaded: dict[str, tuple[str, str, int]] = {}  # folder, name, number of the load
        self._listed: frozenset[str] = frozenset()
        self._changing = 0
        self._log = structlog.get_logger("gateway.workers").bind(worker=client.base_url)

    @property
    def adapters(self) -> Mapping[str, str]:
        return {one: folder for one, (folder, _, _) in self._loaded.items()}

    @property
    def names(self) -> frozenset[str]:
        """The worker's names of the adapters loaded by this gateway."""
        return frozenset(name for _, name, _ in self._loaded.values())

    @asynccontextmanager
    async def hold(self, adapter: Adapter) -> AsyncIterator[int]:
        """Load the adapter and hold it while the block runs; yields the number of that load.

        Raises BackendFailure of :meth:`LoraSlots.hold` or for a refused key, else TransportError.
        """
        async with self._slots.hold(adapter):
            yield self._number_of(adapter.adapter_id)

    async def preload(self, adapter: Adapter) -> None:
        """Load an adapter ahead of its first request. Raises BackendFailure."""
        if adapter.adapter_id in self._fixed:
            return
        self._slots.residency.retry(adapter.adapter_id)
        try:
            await self._slots.preload(adapter)
        except TransportError as error:
            raise failure_of_transport(error, delivered=False) from error

    async def keep(self, known: Sequence[Adapter], pinned: Collection[str], retired: Collection[str]) -> None:
        """Unload idle retired adapters; load the pinned ones and, while there is room, those in demand.

        A failed load is retried on a later call. Raises BackendFailure: the worker does not answer.
        """
        ours = [adapter for adapter in known if adapter.adapter_id not in self._fixed]
        try:
            await self._slots.pin(pinned)
            for name in self._loaded.keys() & set(retired):
                await self._slots.unload(name)
            while await self._slots.load_next(ours):
                await self._slots.pin(pinned)
        except TransportError as error:
            raise failure_of_transport(error, delivered=False) from error

    def lost(self, adapter_id: str, number: int) -> None:
        """Drop the adapter of load ``number``, which the worker lacks: the next request loads it again."""
        if self._number_of(adapter_id) == number:
            self._lose(adapter_id)

    def forget(self) -> None:
        """Drop every adapter: a worker that returns after an outage may have lost them."""
        self._listed = frozenset()
        for adapter_id in tuple(self._loaded):
            self._lose(adapter_id)

    def update(self, listed: frozenset[str], changes: int) -> None:
        """Take the worker's list, requested when :attr:`changes` was ``changes``.

        A list that is older than the last load or unload is ignored.
        """
        if changes != self.changes or self._changing:
            return
        self._listed = listed
        for adapter_id in [one for one, (_, name, _) in self._loaded.items() if name not in listed]:
            self._lose(adapter_id)

    def _lose(self, adapter_id: str) -> None:
        self._drop(adapter_id)
        self._slots.residency.unloaded(adapter_id)

    def _number_of(self, adapter_id: str) -> int:
        """The number of the adapter's load; 0 when it is not loaded."""
        loaded = self._loaded.get(adapter_id)
        return loaded[2] if loaded is not None else 0

    def _drop(self, adapter_id: str) -> None:
        """Forget an adapter that is no longer on the worker."""
        loaded = self._loaded.pop(adapter_id, None)
        if loaded is not None:
            self._listed -= {loaded[1]}

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load the adapter, or adopt it if it is already loaded there."""
        name, path = loaded_name(adapter, self._folder), path_at_worker(adapter, self._folder)
        if name not in self._listed:
            status, body = await self._post(LOAD_PATH, {"lora_name": name, "lora_path": path})
            # 400 is also the answer for an adapter that another gateway or a cancelled call has loaded.
            if status != 200 and not (status == 400 and name in await self._list()):
                raise self._refused(adapter, path, status, body)
            self._log.info("adapter loaded on worker", adapter=adapter.adapter_id, name=name)
        old = self._loaded.get(adapter.adapter_id)
        if old is not None and old[1] != name:
            self._listed -= {old[1]}
            await self._unload(adapter.adapter_id, old[1])  # a cancelled call leaves this to the next load
        self._loaded[adapter.adapter_id] = (adapter.path, name, self.changes + 1)

    async def unload_adapter(self, adapter_id: str) -> None:
        """Unload the adapter's name; the worker's requests in flight finish on its weights."""
        _, name, _ = self._loaded[adapter_id]
        self._drop(adapter_id)
        await self._unload(adapter_id, name)

    async def _unload(self, adapter_id: str, name: str) -> None:
        status, _ = await self._post(UNLOAD_PATH, {"lora_name": name})
        if status not in (200, 404):
            self._log.warning("adapter not unloaded", adapter=adapter_id, name=name, status=status)

    async def _post(self, path: str, body: Mapping[str, str]) -> tuple[int, bytes]:
        self.changes += 1
        self._changing += 1
        try:
            connection = await self._client.post(path, orjson.dumps(body))
            try:
                if connection.status in (401, 403, 429, 502, 503, 504):  # the worker failed, not the adapter
                    raise await refusal_of(connection, model=body["lora_name"])
                return connection.status, await whole_body(connection, MAX_ANSWER_BYTES)
            finally:
                connection.release()
        finally:
            self.changes += 1
            self._changing -= 1

    async def _list(self) -> frozenset[str]:
        answer = await self._client.get(self._client.prefix + MODELS_PATH, timeout_s=LIST_TIMEOUT_S)
        listed = answer.read(read_models)
        return frozenset() if listed is None else listed.names

    def _refused(self, adapter: Adapter, path: str, status: int, body: bytes) -> errors.EngineAdapterError:
        words = body.decode(errors="replace")[:MAX_WORDS]
        self._log.warning(
            "adapter not loaded on worker", adapter=adapter.adapter_id, status=status, answer=words
        )
        if status in (404, 405) and b'"error"' not in body:
            return errors.AdapterUnsupported(
                "the worker loads no adapters while it serves; vLLM does with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
            )
        if status == 404:
            return errors.AdapterNotFound(
                f"the worker finds nothing at {PurePath(path).name} in its folder of adapters; "
                "check adapters_folder"
            )
        return errors.AdapterUnreadable(f"the worker answered {status} to the load request")
