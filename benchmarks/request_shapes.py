"""The same requests to a vLLM worker and to Sluice in front of it: where do the statuses differ, and why?

    python -m benchmarks.request_shapes                     (starts both, on the CPU, with the demo model)
    python -m benchmarks.request_shapes --worker URL --sluice URL --model NAME --key KEY

Prints every request shape whose statuses differ, with the reason; a difference without a reason is a defect,
and the exit code is 1. ``--write`` writes the table of docs/request-shapes.md.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer

from benchmarks.vllm_server import KEY, REPOSITORY, Flags, Server, free_port, vllm

DOCUMENT = REPOSITORY / "docs" / "request-shapes.md"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Who wrote Berserk?"}
SYSTEM = {"role": "system", "content": "You answer in one word."}
REPLY = {"role": "assistant", "content": "Kentaro Miura."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
ABSENT: Any = object()
TIMEOUT_S = 120.0
TRIES = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """One request; ``body`` is JSON or bytes."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] | None = None


def _variants(path: str, base: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Iterator[Shape]:
    for changes in cases:
        body = {name: value for name, value in {**base, **changes}.items() if value is not ABSENT}
        shown = ", ".join(
            f"no {name}" if value is ABSENT else f"{name}={_short(value)}" for name, value in changes.items()
        )
        yield Shape(f"{'chat' if path == CHAT else 'text'}: {shown or 'plain'}", path, body)


def _short(value: object) -> str:
    text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS).decode()
    return text if len(text) <= 110 else f"{text[:107]}…"


SAMPLING: Sequence[Mapping[str, Any]] = (
    {}, {"max_tokens": None}, {"max_tokens": ABSENT}, {"max_tokens": 0}, {"max_tokens": -1},
    {"max_tokens": "5"}, {"max_tokens": 1.5}, {"max_tokens": 1_000_000},
    {"temperature": 0}, {"temperature": 2}, {"temperature": 2.1}, {"temperature": -0.1},
    {"temperature": None}, {"temperature": "0.5"},
    {"top_p": 0.5}, {"top_p": 1}, {"top_p": 0}, {"top_p": 1.1}, {"top_p": None},
    {"top_k": 5}, {"top_k": 0}, {"top_k": -1}, {"top_k": -2}, {"min_p": 0.1}, {"min_p": 1.5},
    {"n": 2}, {"n": 2, "temperature": 0}, {"n": 0}, {"n": None},
    {"stop": "e"}, {"stop": ["e", "a"]}, {"stop": []}, {"stop": None}, {"stop": ""}, {"stop": [""]},
    {"stop": ["x"] * 20},
    {"seed": 1}, {"seed": None}, {"seed": -1}, {"seed": 2**63},
    {"presence_penalty": 0.5}, {"presence_penalty": 2.1}, {"frequency_penalty": None},
    {"repetition_penalty": 1.1}, {"repetition_penalty": 0},
    {"logit_bias": {}}, {"logit_bias": {"5": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 200}},
    {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}}, {"stream_options": None}, {"stream": None},
    {"stream": "true"},
    {"user": "u1"}, {"user": ""}, {"user": None}, {"frobnicate": 1}, {"frobnicate": {"deep": [None]}},
    {"ignore_eos": True}, {"min_tokens": 2}, {"stop_token_ids": [3]}, {"skip_special_tokens": False},
    {"include_stop_str_in_output": True}, {"bad_words": ["x"]}, {"allowed_token_ids": [5, 6]},
    {"priority": 1}, {"cache_salt": "x"}, {"request_id": "mine"}, {"return_token_ids": True},
    {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5}, {"use_beam_search": False},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
    {"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"regex": "[ab]"}},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}},
    {"model": ABSENT}, {"model": None}, {"model": ""}, {"model": "gpt-9"}, {"model": 5},
)  # fmt: skip
CHATS: Sequence[Mapping[str, Any]] = (
    {"max_tokens": ABSENT, "max_completion_tokens": 4}, {"max_completion_tokens": 3},
    {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"top_logprobs": 2},
    {"logprobs": False, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 21},
    {"metadata": {"a": "b"}}, {"store": False}, {"store": True}, {"service_tier": "auto"},
    {"prompt_cache_key": "x"}, {"safety_identifier": "x"}, {"modalities": ["text"]}, {"verbosity": "low"},
    {"tools": []}, {"tools": None}, {"tools": [TOOL]}, {"tool_choice": "none"}, {"tool_choice": "auto"},
    {"parallel_tool_calls": True}, {"functions": []}, {"reasoning_effort": None},
    {"reasoning_effort": "low"}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"a": 1}},
    {"add_generation_prompt": True}, {"echo": False}, {"documents": []},
    {"messages": ABSENT}, {"messages": []}, {"messages": None}, {"messages": "hi"}, {"messages": [SYSTEM]},
    {"messages": [USER, REPLY]}, {"messages": [USER, USER]}, {"messages": [USER, SYSTEM, USER]},
    {"messages": [USER, {"role": "assistant", "content": None}, USER]},
    {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "developer", "content": "Be short."}, USER]},
    {"messages": [{"role": "narrator", "content": "Once."}, USER]},
    {"messages": [{"role": "tool", "tool_call_id": "c", "content": "5"}, USER]},
    {"messages": [{**USER, "name": "Ann"}]}, {"messages": [{**USER, "frobnicate": 1}]},
    {"messages": [USER, {**REPLY, "refusal": None, "tool_calls": [], "annotations": []}, USER]},
    {"messages": [{"role": "user", "content": "ベルセルクの作者は？ 🗡️"}]},
    {"messages": [{"role": "user", "content": "word " * 3000}]},
)  # fmt: skip
TEXTS: Sequence[Mapping[str, Any]] = (
    {}, {"prompt": [5, 6, 7]}, {"prompt": ["one"]}, {"prompt": ["one", "two"]}, {"prompt": [[5, 6]]},
    {"prompt": ""}, {"prompt": []}, {"prompt": ABSENT}, {"prompt": None}, {"prompt": [10_000_000]},
    {"prompt": "word " * 3000}, {"max_tokens": ABSENT}, {"max_tokens": None}, {"echo": True},
    {"echo": True, "max_tokens": 0}, {"max_tokens": 0}, {"prompt": [[5, 6], [7]], "n": 2},
    {"suffix": "x"}, {"logprobs": 1}, {"logprobs": 0}, {"logprobs": 21}, {"n": 2}, {"best_of": 1},
    {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"stop": ["e"]},
    {"messages": [USER]}, {"frobnicate": 1}, {"ignore_eos": True},
)  # fmt: skip


def shapes(model: str) -> list[Shape]:
    """Return all request shapes, each with a unique name."""
    chat = {"model": model, "messages": [USER], "max_tokens": 4}
    text = {"model": model, "prompt": "Berserk was written by", "max_tokens": 4}
    broken = {
        "an empty body": b"", "no JSON": b"{", "an array": b"[]", "null": b"null",
        "invalid UTF-8": b'{"model": "\xff"}', "a lone surrogate": b'{"model": "\\ud800", "messages": []}',
    }  # fmt: skip
    plain = orjson.dumps(chat)
    return [
        *_variants(CHAT, chat, SAMPLING),
        *_variants(CHAT, chat, CHATS),
        *_variants(TEXT, text, TEXTS),
        *(Shape(f"chat: {name}", CHAT, body) for name, body in broken.items()),
        Shape("chat: text/plain", CHAT, plain, headers={"content-type": "text/plain"}),
        Shape("chat: no content type", CHAT, plain, headers={"content-type": ""}),
        Shape("chat: no key", CHAT, chat, headers={"authorization": ""}),
        Shape("chat: a wrong key", CHAT, chat, headers={"authorization": "Bearer nope"}),
        Shape("chat: GET", CHAT, method="GET"),
        Shape("models", "/v1/models", method="GET"),
        Shape("models: one", f"/v1/models/{model}", method="GET"),
        Shape("models: unknown", "/v1/models/gpt-9", method="GET"),
        Shape("tokenize: a text", "/tokenize", {"model": model, "prompt": "hi"}),
        Shape("tokenize: messages", "/tokenize", {"model": model, "messages": [USER]}),
        Shape("tokenize: nothing", "/tokenize", {"model": model}),
        Shape("detokenize", "/detokenize", {"model": model, "tokens": [5, 6]}),
        Shape("health", "/health", method="GET"),
        Shape("ping", "/ping", method="GET"),
        Shape("metrics", "/metrics", method="GET"),
        Shape("embeddings", "/v1/embeddings", {"model": model, "input": "hi"}),
        Shape("an unknown path", "/v1/nowhere", {}),
    ]


@dataclass(frozen=True, slots=True)
class Compared:
    """The two statuses of one shape."""

    shape: Shape
    worker: int
    sluice: int


async def compare(asked: Sequence[Shape], worker: str, sluice: str, key: str) -> list[Compared]:
    """Send each shape to both; eight at a time, so that neither side's queue matters.

    A 503 is retried, as the official client does, and longer: on a busy machine a worker may miss its probes.
    """
    turns = asyncio.Semaphore(8)

    async def status(client: httpx.AsyncClient, shape: Shape) -> int:
        content = shape.body if isinstance(shape.body, bytes) else None
        if shape.body is not None and content is None:
            content = orjson.dumps(shape.body)
        given = {"content-type": "application/json", "authorization": f"Bearer {key}"} | dict(
            shape.headers or {}
        )
        headers = {name: value for name, value in given.items() if value}
        async with turns:
            for _ in range(TRIES):
                answer = await client.request(shape.method, shape.path, content=content, headers=headers)
                if answer.status_code != 503:
                    break
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
            return answer.status_code

    async with (
        httpx.AsyncClient(base_url=worker, timeout=TIMEOUT_S) as first,
        httpx.AsyncClient(base_url=sluice, timeout=TIMEOUT_S) as second,
    ):
        rows = [asyncio.gather(status(first, one), status(second, one)) for one in asked]
        return [Compared(one, *await row) for one, row in zip(asked, rows, strict=True)]


_STRICT = "vLLM converts the value to the field's type; Sluice does not"
_NOT_YET = "Sluice does not implement it, so it refuses it; vLLM ignores or applies it"
_FORM = "it changes the format of the worker's answer, which Sluice parses"
_MODEL = "the field is required, as in OpenAI's API: a gateway with several models has no default"
_TURN = "the last message must be the user's or a tool's and have text: Sluice builds the prompt around it"
REASONS: Sequence[tuple[str, str]] = (
    ('max_tokens="5"', _STRICT), ('temperature="0.5"', _STRICT), ('stream="true"', _STRICT),
    ("n=2, temperature=0", "vLLM takes no `n` above 1 at temperature 0; Sluice sends it `top_k` 1 instead"),
    ("logit_bias", "OpenAI allows -100 to 100, and so does Sluice"),
    ("cache_salt", "Sluice derives the salt from the tenant"),
    ("request_id", "Sluice takes a request's label from `sluice.request_id` or the header `x-request-id`"),
    ("return_token_ids", _FORM),
    ("prompt_logprobs", f"{_FORM}; on the CPU, a vLLM started with LoRA crashes on it"),
    ("truncate_prompt_tokens", "Sluice itself counts and trims prompts"),
    ("no model", _MODEL), ("model=null", _MODEL), ('model=""', _MODEL),
    ("store=true", "Sluice stores no chat completions, so it refuses the field"),
    ("verbosity", _NOT_YET),
    ("tools=[]", "an empty list has no effect; clients send it"),
    ("tool_choice", "without tools it has no effect"),
    ("narrator", "OpenAI's API has no such role"),
    ("chat: messages=", _TURN),
    ("text: messages", "the field belongs to chats; vLLM ignores it and completes `prompt`"),
    ("content type", "the body is parsed as JSON whatever the header says: `curl -d` sends another type"),
    ("text/plain", "the body is parsed as JSON whatever the header says: `curl -d` sends another type"),
    ("key", "Sluice requires a key; this worker was started without one"),
    ("models: one", "vLLM has only the list of models"),
)  # fmt: skip
"""Why statuses differ: the first entry whose text the shape's name contains."""


def reason_of(row: Compared) -> str | None:
    """Return why the statuses of a shape differ, or ``None`` when no reason is known: then it is a defect."""
    return next((reason for part, reason in REASONS if part in row.shape.name), None)


def document(rows: Sequence[Compared]) -> str:
    """The table of the document."""
    differ = [row for row in rows if row.worker != row.sluice]
    lines = [
        "# Request shapes: Sluice and vLLM compared",
        "",
        f"`python -m benchmarks.request_shapes --write` sends {len(rows)} requests to a `vllm serve` and to",
        f"a Sluice in front of it (`sluice serve --worker`). {len(rows) - len(differ)} have the same HTTP",
        "status. The others:",
        "",
        "| request | status of vLLM | status of Sluice | reason |",
        "| --- | --- | --- | --- |",
    ]
    for row in differ:
        name, reason = row.shape.name, reason_of(row) or "**a defect**"
        lines.append(f"| `{name}` | {row.worker} | {row.sluice} | {reason} |")
    return "\n".join(lines) + "\n"


def gateway(worker: str, folder: Path, key: str = KEY) -> Server:
    """Run Sluice with its defaults in front of the worker."""
    port = free_port()
    env = {"SLUICE_ADMIN_KEY": key, "SLUICE_SERVER__PORT": str(port), "WORKER_API_KEY": key}
    env |= {"PYTHONPATH": str(REPOSITORY), "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db"}
    env |= {"SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db"}
    command = [sys.executable, "-m", "ops.cli", "serve", "--worker", worker]
    # In the temporary folder: the repository has a routing.yaml for its own backends.
    return Server("sluice", "demo", command, env, f"http://127.0.0.1:{port}", folder / "sluice.log", folder)


async def _run(worker: str | None, sluice: str | None, model: str, key: str) -> list[Compared]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        place = Path(folder)
        if worker is None:
            flags = Flags(str(REPOSITORY / "models" / "demo"), max_model_len=1024, max_num_seqs=16)
            started = vllm(flags, place)
            servers.callback(started.close)
            await started.wait_ready("/health")
            worker = started.url
        if sluice is None:
            front = gateway(worker, place, key)
            servers.callback(front.close)
            await front.wait_ready("/ready")
            sluice = front.url
        return await compare(shapes(model), worker, sluice, key)


def main(
    worker: Annotated[str | None, typer.Option(help="A running vLLM; unset: one is started.")] = None,
    sluice: Annotated[str | None, typer.Option(help="A running Sluice in front of it.")] = None,
    model: Annotated[str, typer.Option(help="The model's name.")] = "demo",
    key: Annotated[str, typer.Option(help="The key of both.")] = KEY,
    write: Annotated[bool, typer.Option("--write", help="Write docs/request-shapes.md.")] = False,
) -> None:
    """Compare, print the differences, and fail on one without a reason."""
    rows = asyncio.run(_run(worker, sluice, model, key))
    text = document(rows)
    print(text)
    if write:
        DOCUMENT.write_text(text, encoding="utf-8")
    unexplained = [row for row in rows if row.worker != row.sluice and reason_of(row) is None]
    raise typer.Exit(bool(unexplained))


if __name__ == "__main__":
    typer.run(main)
