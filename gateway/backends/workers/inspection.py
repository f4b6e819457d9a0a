"""Inspects workers: whether they are reachable, their model, its length and tokenizer, and one token.

The gateway inspects its workers every ``INSPECT_S`` without generating, so that ``/ready`` knows more than
that a port answers; ``sluice doctor`` and ``/health/deep`` also ask for a token.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from gateway.backends.workers.chunk_repair import MAX_COUNT
from gateway.backends.workers.client import Whole, WorkerClient
from gateway.backends.workers.errors import TransportError
from gateway.backends.workers.tokenizer_check import TOKENIZE_PATH, TOKENIZED, read_tokens
from gateway.contracts.front_headers import SPEAKING

INSPECT_S = 30.0
TIMEOUT_S = 10.0
MAX_SHOWN = 10
# Most models of one pool: each has metrics, a queue and a circuit breaker of its own.
MAX_MODELS = 256
KEY_REFUSED: Final = "refuses the key; set api_key_env or api_key_file to where its key is"
LACKS_V1: Final = "has OpenAI's API under /v1; append /v1 to its address in base_urls"
_GENERATING: Final = ("/chat/completions", "/completions")
_OTHERS: Final = ("/embeddings", "/rerank", "/score", "/audio/transcriptions")


class ServedModel(msgspec.Struct, frozen=True):
    """A model that a worker lists; ``parent`` names the base model of a LoRA adapter.

    Servers have other names for the length: OpenRouter and Together ``context_length``, Groq
    ``context_window``, Mistral ``max_context_length``, llama.cpp ``meta.n_ctx``.
    """

    id: str
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    context_length: Any = None
    context_window: Any = None
    max_context_length: Any = None
    meta: Any = None

    @property
    def length(self) -> int | None:
        """Its context length in tokens, under whichever name."""
        meta = self.meta.get("n_ctx") if isinstance(self.meta, dict) else None
        named = (self.max_model_len, self.context_length, self.context_window, self.max_context_length, meta)
        return next((one for one in named if isinstance(one, int) and 0 < one <= MAX_COUNT), None)


class ModelList(msgspec.Struct, frozen=True):
    """A worker's list of models, the answer of ``/models``."""

    data: list[ServedModel] = []
    sluice_role: str | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset([one.id for one in self.data if one.id])

    @property
    def of_sluice(self) -> bool:
        """Whether the worker is another Sluice: its models have ``owned_by: sluice``."""
        return any(one.owned_by == "sluice" for one in self.data)


# Raises msgspec.DecodeError or UnicodeDecodeError, both of which are ValueErrors.
read_models = msgspec.json.Decoder(ModelList).decode


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found at one worker.

    Args:
        faults: each is a line that says what to change; with ``unusable`` every request fails.
        tokenizer: ``equal``, ``differs``, ``its own`` if the gateway cannot read it, or ``not known``.
        latency_ms: time of a request for one token; ``None`` also of a worker that only embeds, scores or
            transcribes.
    """

    url: str
    unusable: bool = False
    faults: tuple[str, ...] = ()
    model: str | None = None
    max_model_len: int | None = None
    tokenizer: str = "not known"
    latency_ms: float | None = None


def offers_of(
    models: Sequence[ServedModel] | None, configured: str | None
) -> Sequence[ServedModel] | str | None:
    """The entries of a worker's list that a pool uses, or why there is none, as the end of a sentence.

    ``None``: the worker has no list, or its list lacks the configured model but may be partial, as those of
    hosted services, which have no lengths. Entries with one ``root`` are one model, named as the root or, if
    the root is not listed, as the first of them; a Sluice lists a model and its aliases in this way.
    """
    bases = [one for one in models or () if one.parent is None]
    if configured is not None:
        found = [one for one in models or () if one.id == configured]
        if not found and bases and all(one.max_model_len for one in bases):
            names = ", ".join(sorted(one.id for one in bases)[:MAX_SHOWN])
            return f"serves {names}, and not {configured}"
        return found[:1] or None
    if models is None:
        return "does not list its models; name one as model"
    if not bases:
        return "lists no model; load one first"
    by_root: dict[str, ServedModel] = {}
    for one in bases:
        root = one.root or one.id
        if root not in by_root or one.id == root:
            by_root[root] = one
    if len(by_root) > MAX_MODELS:
        return f"lists {len(by_root)} models; name one as model, {MAX_MODELS} or fewer are served without"
    return tuple(by_root.values())


def why_no_list(status: int) -> str:
    """Why a worker of a pool without a configured model has no list of models, as the end of a sentence."""
    if status in (401, 403):
        return KEY_REFUSED
    return f"does not list its models (status {status}); does base_urls end in /v1? If so, name one as model"


async def lacks_v1(client: WorkerClient, timeout_s: float) -> bool:
    """Whether the worker has OpenAI's API under ``/v1`` of its base URL and not at it. Raises TransportError.

    An empty request costs nothing, and each server refuses it; only one without the path does so with 404.
    """
    listed = (await client.get(f"{client.prefix}/v1/models", timeout_s=timeout_s)).read(read_models)
    if listed is None or not listed.data:
        return False
    for path in (*_GENERATING, *_OTHERS):
        if (await client.get(client.prefix + path, timeout_s=timeout_s, body=b"{}")).status != 404:
            return False
    return True


async def generates(client: WorkerClient, timeout_s: float) -> bool:
    """Whether the worker generates text. Raises TransportError.

    A server refuses a GET with 405 where it has a path for POST alone. OpenAI lists stored chats where it
    generates them, and a service may refuse or throttle the GET: only 404 says that the path is missing.
    A server that answers 404 for every path may not follow this rule, so it counts as generating.
    """

    async def status(path: str) -> int:
        return (await client.get(client.prefix + path, timeout_s=timeout_s)).status

    for path in _GENERATING:
        if await status(path) != 404:
            return True
    for path in _OTHERS:
        if await status(path) == 405:
            return False
    return True


async def inspect(
    client: WorkerClient,
    url: str,
    model: str | None,
    sample_ids: Sequence[int] | None,
    max_model_len: int,
    *,
    generate: bool,
    limit_field: str,
    vllm: bool = False,
) -> Inspection:
    """Ask one worker; raises nothing.

    Args:
        model: the configured model; ``None``: the first one that the worker lists.
        sample_ids: the gateway's token ids of ``TOKENIZED``; ``None``: it cannot read the model's tokenizer.
        limit_field: the field of a chat's body with the answer's limit.
        vllm: whether requests have vLLM's fields, unless the worker is a Sluice.
    """
    try:
        answer = await client.get(f"{client.prefix}/models", timeout_s=TIMEOUT_S)
    except TransportError as error:
        return _unusable(url, f"does not answer ({error}); start it, or correct base_urls")
    if answer.status in (401, 403):
        return _unusable(url, KEY_REFUSED)
    found: ServedModel | None = None
    faults = []
    other: str | None = None  # why the worker lacks the configured model, unless its list is partial
    models = answer.read(read_models)
    if answer.status == 200 and models is None and model is None:
        return _unusable(url, "its list of models is not OpenAI's; does base_urls end in /v1?")
    if models is not None:
        offered = offers_of(models.data, model)
        if model is None and isinstance(offered, str):
            return _unusable(url, offered)
        found = None if isinstance(offered, str) or not offered else offered[0]
        if models.sluice_role is not None and models.sluice_role not in SPEAKING:
            faults.append(
                f"its key there is of the role '{models.sluice_role}', so it books all to that key's tenant; "
                "set api_key_env to a key of `sluice keys create NAME --role front` there"
            )
        if found is None:
            served = ", ".join(sorted(one.id for one in models.data)[:MAX_SHOWN]) or "nothing"
            other = f"does not serve {model!r}; correct model; it serves: {served}"
            if isinstance(offered, str):
                return _unusable(url, other)
    if model is None:
        if found is None:
            return _unusable(url, why_no_list(answer.status))
        model = found.id
    longest = None if found is None else found.length
    if longest is not None and longest < max_model_len:
        keys = f"models.{model}.max_model_len, or engine.max_model_len,"
        faults.append(f"takes {longest} tokens, prompts may have {max_model_len}; set {keys} to {longest}")
    tokenizer = await _tokenizer(client, model, sample_ids)
    if tokenizer == "differs":
        faults.append("its tokenizer differs from engine.tokenizer; name the tokenizer of its model")
    latency_ms = None
    if generate:
        began = time.monotonic()
        vllm = vllm and not (models is not None and models.of_sluice)
        status = await _one_token(client, model, limit_field, {"return_token_ids": False} if vllm else {})
        if status == 200:
            latency_ms = round((time.monotonic() - began) * 1000, 1)
        elif status != 404 or not await _does_other_work(client):
            path = ", and whether base_urls lacks its path, usually /v1" if status == 404 else ""
            fault = f"generates nothing (status {status}); see its log{path}"
            if 300 <= status < 400:
                fault = f"redirects requests (status {status}), which is not followed; correct base_urls"
            if vllm and status in (400, 422):
                fault += "; if it refuses vLLM's fields, set dialect: openai"
            return _unusable(url, other if other and status == 404 else fault)
    return Inspection(url, False, tuple(faults), model, longest, tokenizer, latency_ms)


def _unusable(url: str, fault: str) -> Inspection:
    return Inspection(url, True, (fault,))


async def _does_other_work(client: WorkerClient) -> bool:
    try:
        return not await generates(client, TIMEOUT_S)
    except TransportError:
        return False


async def _one_token(client: WorkerClient, model: str, limit_field: str, fields: Mapping[str, Any]) -> int:
    text = {"model": model, "prompt": "test", "max_tokens": 1, **fields}
    status = (await _post(client, f"{client.prefix}/completions", text)).status
    if status in (400, 404, 405):  # hosted services have chats alone; some refuse a limit of one token
        messages = [{"role": "user", "content": "test"}]
        chat = {"model": model, "messages": messages, limit_field: 16, **fields}
        status = (await _post(client, f"{client.prefix}/chat/completions", chat)).status
    return status


async def _tokenizer(client: WorkerClient, model: str, sample_ids: Sequence[int] | None) -> str:
    body = {"model": model, "prompt": TOKENIZED, "add_special_tokens": False}
    found = (await _post(client, client.root + TOKENIZE_PATH, body)).read(read_tokens)
    if found is None:
        return "not known"
    if sample_ids is None:
        return "its own"
    return "equal" if found == tuple(sample_ids) else "differs"


async def _post(client: WorkerClient, path: str, body: Mapping[str, Any]) -> Whole:
    """The answer; without one, its status is 0."""
    try:
        return await client.get(path, timeout_s=TIMEOUT_S, body=orjson.dumps(body))
    except TransportError:
        return Whole(0, b"")


class WorkerInspections:
    """Inspects the workers of all pools periodically; a backend's inspections are in worker order."""

    def __init__(self, ask: Callable[[bool], Awaitable[Mapping[str, Sequence[Inspection]]]]) -> None:
        self._ask = ask
        # One at a time: more would take the connections that a worker's probes need.
        self._asking = asyncio.Lock()
        self.latest: Mapping[str, Sequence[Inspection]] = {}

    async def run(self) -> None:
        while True:
            await self.now(generate=False)
            await asyncio.sleep(INSPECT_S)

    async def now(self, *, generate: bool = True) -> Mapping[str, Sequence[Inspection]]:
        """Inspect now; with ``generate``, also ask each worker for one token."""
        async with self._asking:
            self.latest = found = await self._ask(generate)
        return found

    def unusable(self, backend: str) -> bool:
        """Whether every worker of the backend fails every request."""
        found = self.latest.get(backend, ())
        return bool(found) and all(one.unusable for one in found)
