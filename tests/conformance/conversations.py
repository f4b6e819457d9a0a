"""Forty conversations, as bodies of OpenAI's chat, and the outcome of each on a backend.

python -m tests.conformance.conversations            (starts every backend; prints the table)
python -m tests.conformance.conversations --write    (also writes docs/conversations.md and the answers)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from admission.values import AdmissionLimits
from benchmarks.bedrock.stand_in import Behaviour
from budgeting.values import Plan, ToolKind
from gateway.backends.custom_input import wrapped
from gateway.backends.hermes import call_format
from gateway.backends.port import Backend
from gateway.contracts.answer import Answer, Choice
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.openai_stream import ChunkFrames, OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import FinishReason, GenerateRequest, Usage
from gateway.errors import PublicError, public_error
from resilience.events import Resumed
from tests.conformance.harness import MAX_MODEL_LEN, REPOSITORY, Specimen
from tests.journey.rig import CALLER, JourneyRig, RecordingSink, build_rig, unchecked

DOCUMENT = REPOSITORY / "docs" / "conversations.md"
ANSWERS = Path(__file__).with_name("conversations.json")
# A vLLM under test runs this many in one step, which takes about as long as a step of a single answer.
CONCURRENCY = 32
# No request is refused for a long wait, however busy the machine is.
PATIENT = AdmissionLimits(
    max_input_tokens=4096, max_wait_s=300.0, tpot_slo_s=None, ttft_slo_s=None, first_token_within_s=None
)
_numbers = itertools.count(1)


def tool(name: str, description: str, field: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema, **more},
    }


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def called(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    """Return the assistant's message with these calls, each given as id, tool and arguments."""
    listed = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
        for one, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def result(call: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


SHOP = [
    tool("stock_lookup", "Look up the stock and price of a series.", "title"),
    tool("order_status", "Look up the status of an order.", "order_id"),
]
# A tool that must be called allows one argument value only: engines constrain required calls differently.
CLOSED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {field: {"enum": [value]}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }
    for name, field, value in (("stock_lookup", "title", "Berserk"), ("order_status", "order_id", "48213"))
]
STOCK, ORDER = user("Is Berserk in stock?"), user("Where is my order 48213?")
BERSERK = ("call_1", "stock_lookup", '{"title":"Berserk"}')
IN_STOCK = json.dumps({"title": "Berserk", "stock": "out of stock", "price": "14.99"})
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SYSTEM = {"role": "system", "content": "You are the clerk of a manga shop."}


def talk(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def shop(*messages: Any, **fields: Any) -> dict[str, Any]:
    return talk(*messages, tools=SHOP, max_tokens=80, **fields)


CONVERSATIONS: Mapping[str, Mapping[str, Any]] = {
    "one question": talk(user("Which volume comes next?")),
    "a second question": talk(
        user("Who wrote Berserk?"), {"role": "assistant", "content": "Kentaro Miura."}, user("And Vagabond?")
    ),
    "a system text": talk(SYSTEM, user("How long does shipping take?")),
    "two system texts": talk(SYSTEM, {"role": "system", "content": "Be short."}, user("Who wrote Berserk?")),
    "a developer's text": talk({"role": "developer", "content": "Be short."}, user("Who wrote Berserk?")),
    "two questions in a row": talk(user("Hello!"), user("Who wrote Berserk?")),
    "a turn with a name": talk(user("Who wrote Berserk?", name="Ann")),
    "content parts": talk(
        user([{"type": "text", "text": "Who wrote "}, {"type": "text", "text": "Berserk?"}])
    ),
    "other scripts and emoji": shop(user("ベルセルクの作者は？ 🗡️ Ünïcödé")),
    "an image": talk(
        user([{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}])
    ),
    "a stop string": talk(user("How long does shipping take?"), stop=["Germany"]),
    "a stop string inside a word": talk(user("How long does shipping take?"), stop=["hippi"]),
    "cut by max_tokens": talk(user("Tell me about a manga with a dragon."), max_tokens=5),
    "two answers": talk(user("Which volume comes next?"), n=2),
    "log-probabilities": talk(user("Who wrote Berserk?"), logprobs=True, top_logprobs=2, max_tokens=6),
    "a JSON object": talk(user("As JSON please"), response_format={"type": "json_object"}, max_tokens=8),
    "a JSON schema": talk(user("Is it in stock?"), response_format=SHAPE),
    "a choice": talk(user("Is it in stock?"), structured_outputs={"choice": ["yes", "no"]}),
    "a call": shop(STOCK),
    "a call of the second tool": shop(ORDER),
    "tools and no call": shop(user("Hello!")),
    "tool_choice none": shop(STOCK, tool_choice="none"),
    "tool_choice required": talk(
        STOCK, tools=CLOSED[:1], tool_choice="required", parallel_tool_calls=False, max_tokens=80
    ),
    "tool_choice of a name": talk(
        STOCK,
        tools=CLOSED,
        tool_choice={"type": "function", "function": {"name": "order_status"}},
        max_tokens=80,
    ),
    "tool_choice of allowed tools": talk(
        STOCK,
        tools=CLOSED,
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "order_status"}}],
            },
        },
        parallel_tool_calls=False,
        max_tokens=80,
    ),
    "no parallel calls": shop(STOCK, parallel_tool_calls=False),
    "two answers with calls": shop(STOCK, n=2),
    "a strict tool": talk(
        STOCK, tools=[tool("stock_lookup", "Look up the stock.", "title", strict=True)], max_tokens=80
    ),
    "a tool without parameters": talk(
        STOCK,
        tools=[SHOP[0], {"type": "function", "function": {"name": "opening_hours"}}],
        max_tokens=80,
    ),
    "a custom tool": talk(
        user("Apply the patch."),
        tools=[{"type": "custom", "custom": {"name": "patch", "description": "Edits a file."}}],
        tool_choice="required",
        max_tokens=80,
    ),
    "a call cut by max_tokens": shop(STOCK) | {"max_tokens": 33},
    "a schema or a call": shop(STOCK, response_format=SHAPE),
    "a result": shop(STOCK, called(BERSERK), result("call_1", [{"type": "text", "text": IN_STOCK}])),
    "a result that is an error": shop(
        STOCK, called(BERSERK), result("call_1", '{"error":"the stock system is down"}')
    ),
    "results of two calls": shop(
        user("Is Berserk in stock, and where is my order 48213?"),
        called(BERSERK, ("call_2", "order_status", '{"order_id":"48213"}'), content="Let me look."),
        result("call_1", IN_STOCK),
        result("call_2", '{"order_id":"48213","status":"shipped"}'),
    ),
    "a result and a new question": shop(
        STOCK,
        called(("call_1", "stock_lookup", '{"title":"鋼の錬金術師 “FMA”"}')),
        result("call_1", '{"title":"鋼の錬金術師","stock":"3 copies"}'),
        {"role": "assistant", "content": "There are 3 copies."},
        ORDER,
    ),
    "reasoning in the history": talk(
        user("Who wrote Berserk?"),
        {"role": "assistant", "content": "Kentaro Miura.", "reasoning": "I know this one."},
        user("And Vagabond?"),
    ),
    "reasoning before the answer": talk(user("Who wrote Vagabond?")),
    "an effort of reasoning": talk(user("Who wrote Berserk?"), reasoning_effort="low"),
    "a template's variable": talk(
        user("Who wrote Berserk?"), chat_template_kwargs={"enable_thinking": False}
    ),
}
# The reasoning that a stand-in plays; the demo model does not reason.
REASONED = {"reasoning before the answer": "It is a manga. "}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one conversation: the kinds of its events and its choices, or the refused parameter."""

    kinds: tuple[str, ...] = ()
    choices: tuple[Mapping[str, Any], ...] = ()
    refused: str | None = None

    def cell(self, expected: Outcome) -> str:
        """Return the table's cell: how this outcome compares with the expected one."""
        if self.refused is not None:
            return f"refused: `{self.refused}`"
        if expected.refused is not None:
            return f"answered: {self.shown}"
        if self == expected:
            return "same"
        reasons = [[one["finish_reason"] for one in outcome.choices] for outcome in (self, expected)]
        if self.kinds == expected.kinds and reasons[0] == reasons[1]:
            return "same events"
        return "other events"

    @property
    def shown(self) -> str:
        """The kinds of the first choice's events, or the refused parameter, as text."""
        return ", ".join(self.kinds) or f"refused: `{self.refused}`"


def stored_outcomes() -> dict[str, Outcome]:
    """Read the embedded engine's outcomes by conversation from the stored file."""
    stored = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return {
        name: Outcome(tuple(one["kinds"]), tuple(one["choices"]), one["refused"])
        for name, one in stored.items()
    }


def expected_of(specimen: Specimen, stored: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes that the specimen must have; a scripted model also gives the scripted reasoning."""
    expected = dict(stored)
    for name, reasoning in REASONED.items() if specimen.script is not None else ():
        [choice] = stored[name].choices
        expected[name] = Outcome(("reasoning", *stored[name].kinds), ({**choice, "reasoning": reasoning},))
    return expected


async def _bound(request: GenerateRequest) -> GenerateRequest:
    """Add the grammar of tool calls, for an engine that writes calls as text."""
    calls = call_format(
        request.tools, request.tool_choice, request.parallel_tool_calls, request.response_format
    )
    return request if calls is None else structs.replace(request, call_format=calls)


def rig_of(specimen: Specimen, backend: Backend) -> JourneyRig:
    """Build a journey to the backend, which is the specimen's or delegates to it."""
    return build_rig(
        specimen.tokenizer,
        backends=[backend],
        max_model_len=MAX_MODEL_LEN,
        route={"fallback": [], "timeout_ms": 300_000},
        limits=PATIENT,
        check_shape=_bound if backend.kind == "embedded" else unchecked,
    )


async def run_conversations(specimen: Specimen, scripted: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Run the conversations, ``CONCURRENCY`` at a time; one after the other where the answers are scripted.

    Raises AssertionError naming the conversation whose events, answer or counts do not fit together.
    """
    rig = rig_of(specimen, specimen.backend)
    turns = asyncio.Semaphore(1 if specimen.script else CONCURRENCY)
    found: dict[str, Outcome] = {}

    async def one(name: str) -> None:
        async with turns:
            streamed, whole = [
                await answer_of(rig, specimen, name, scripted.get(name), stream=stream)
                for stream in (True, False)
            ]
            same = (streamed.choices, streamed.refused) == (whole.choices, whole.refused)
            assert same, f"{name}: the stream and the whole answer differ: {streamed}, {whole}"
            found[name] = streamed

    async with asyncio.TaskGroup() as group:
        for name in CONVERSATIONS:
            group.create_task(one(name))
    if specimen.script is not None:
        specimen.script()  # the last conversation is refused, and leaves its answer
    assert not rig.in_flight.in_flight
    await specimen.wait_idle()
    return {name: found[name] for name in CONVERSATIONS}


def parsed(body: Mapping[str, Any]) -> ParsedRequest:
    """Parse a body of OpenAI's chat as a new request."""
    number = next(_numbers)
    origin = RequestOrigin(
        f"req_{number}", f"gen_{number}", CALLER, time.monotonic(), int(time.time()), f"{number:032x}"
    )
    return OpenAIDialect(chat=True).parse(json.dumps(body).encode(), origin)


async def answer_of(
    rig: JourneyRig, specimen: Specimen, name: str, scripted: Outcome | None = None, *, stream: bool = True
) -> Outcome:
    """Run one conversation, check its answer and return its outcome."""
    if specimen.script is not None:
        specimen.script(_behaviour(scripted or Outcome()))
    body = {
        "model": specimen.backend.model,
        "max_tokens": 20,
        "temperature": 0,
        **CONVERSATIONS[name],
        "stream": stream,
    }
    try:
        asked = parsed(body)
    except Exception as error:
        return _refused(name, public_error(error))
    sink = await rig.run(asked.request)
    if sink.error is not None:
        return _refused(name, sink.error)
    assert sink.answer is not None
    described = tuple([_described(choice) for choice in sink.answer.choices])
    _check_prompt(name, specimen, sink.plans[0], sink.answer.usage)
    if stream:
        exact = specimen.script is None and not any(isinstance(event, Resumed) for event in rig.events)
        _check_events(name, sink.deltas, sink.answer, exact=exact)
        dialect = OpenAIDialect(chat=True)
        frames = dialect.frames(asked)
        chunks = [_chunk(frames, event) for event in sink.deltas]
        sent = b"".join([frames.opening, *chunks, frames.finish(sink.answer)])
        messages = json.loads(dialect.whole(asked, sink.answer))["choices"]
        assert _folded(sent, len(messages)) == [_message(one) for one in messages], name
    return Outcome(_kinds(sink), described)


def _check_prompt(name: str, specimen: Specimen, plan: Plan, usage: Usage) -> None:
    if specimen.exact_prompt:
        counted = len(plan.token_ids)
        # A vLLM worker gets the allowed tools alone; the prompt was counted with all of them.
        least = 1 if "allowed tools" in name else counted
        assert least <= usage.input_tokens <= counted, f"{name}: {counted}, {usage.input_tokens} computed"


def _check_events(name: str, events: Sequence[Delta], answer: Answer, *, exact: bool) -> None:
    """Check that the events fold to the answer, that their tokens add up, and that call arguments are whole."""
    tokens, counted = sum(event.tokens for event in events), answer.usage.output_tokens
    # A stand-in's tokens are estimated, and may be more. A resumed answer's may be more if the first call gave
    # a token of half a character with the text before it: the second call generates that token again.
    fits = tokens == counted if exact else tokens >= counted
    assert fits, f"{name}: {tokens} tokens of {counted}"
    fold = AnswerFold(len(answer.choices))
    for event in events:
        fold.take(event)
    fold.end([choice.finish_reason for choice in answer.choices])
    for index, choice in enumerate(answer.choices):
        folded = (fold.text(index), fold.reasoning(index), fold.tool_calls(index))
        assert folded == (choice.text, choice.reasoning, choice.tool_calls), name
        for call in choice.tool_calls if choice.finish_reason is FinishReason.TOOL_CALLS else ():
            assert call.kind is ToolKind.CUSTOM or json.loads(call.arguments), name


def _chunk(frames: ChunkFrames, event: Delta) -> bytes:
    if type(event) is not Delta:
        return frames.event(event)
    return frames.delta(event) if event.text else b""


def _refused(name: str, error: PublicError) -> Outcome:
    assert 400 <= error.status < 500 and error.param, f"{name}: {error}"
    return Outcome(refused=error.param)


def _kinds(sink: RecordingSink) -> tuple[str, ...]:
    """Return the kinds of the first choice's events that have content, equal neighbours merged."""
    kinds = {Reasoning: "reasoning", ToolBegin: "call", ToolArgs: "arguments", ToolEnd: "end"}
    of_first = [one for one in sink.deltas if not one.index and (one.text or isinstance(one, ToolEnd))]
    return tuple(kind for kind, _ in itertools.groupby(kinds.get(type(one), "text") for one in of_first))


def _described(choice: Choice) -> Mapping[str, Any]:
    return {
        "text": choice.text,
        "reasoning": choice.reasoning,
        "calls": [[call.name, call.arguments] for call in choice.tool_calls],
        "finish_reason": choice.finish_reason.value,
    }


def _message(choice: Mapping[str, Any]) -> list[Any]:
    message = choice["message"]
    return [
        message["content"] or "",
        message.get("reasoning", ""),
        message.get("tool_calls", []),
        choice["finish_reason"],
    ]


def _folded(chunks: bytes, count: int) -> list[list[Any]]:
    """Assemble the messages from the chunks, as a client does."""
    made: list[list[Any]] = [["", "", [], None] for _ in range(count)]
    for line in chunks.decode().split("\n\n"):
        data = line.removeprefix("data: ")
        for choice in json.loads(data)["choices"] if data.startswith("{") else ():
            mine, delta = made[choice["index"]], choice["delta"]
            mine[0] += delta.get("content") or ""
            mine[1] += delta.get("reasoning") or ""
            mine[3] = choice["finish_reason"] or mine[3]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(mine[2]):
                    mine[2].append({key: value for key, value in call.items() if key != "index"})
                    continue
                kind = "custom" if "custom" in call else "function"
                field = "input" if kind == "custom" else "arguments"
                mine[2][call["index"]][kind][field] += call[kind][field]
    return made


def _behaviour(scripted: Outcome) -> Behaviour:
    """Return the script with which a stand-in plays the outcome's answer."""
    [choice] = scripted.choices[:1] or [{"text": "Yes.", "calls": [], "finish_reason": "stop"}]
    text, calls = choice["text"], choice["calls"]
    cut = choice["finish_reason"] == "length"
    return Behaviour(
        pieces=tuple(text[at : at + 7] for at in range(0, len(text), 7)),
        reasoning=tuple(filter(None, [choice.get("reasoning")])),
        calls=tuple(
            (called_name, tuple(arguments[at : at + 5] for at in range(0, len(arguments), 5)))
            for called_name, written in calls
            for arguments in (wrapped(written) if called_name == "patch" else written,)
        ),
        stop_reason="max_tokens" if cut else None,
    )


def cells_of(found: Mapping[str, Outcome], expected: Mapping[str, Outcome]) -> list[str]:
    """Return a backend's column of the table."""
    return [found[name].cell(expected[name]) for name in CONVERSATIONS]


def document(columns: Mapping[str, Sequence[str]], stored: Mapping[str, Outcome]) -> str:
    """Return the text of the whole document."""
    lines = [
        f"| conversation | events | {' | '.join(columns)} |",
        f"| --- | --- | {' | '.join('---' for _ in columns)} |",
    ]
    lines += [
        f"| {name} | {stored[name].shown} | {' | '.join(cells)} |"
        for name, *cells in zip(CONVERSATIONS, *columns.values(), strict=True)
    ]
    lines += ["", "*other events*:", ""] + [f"- {name}: {reason}." for name, reason in OTHER_EVENTS.items()]
    return f"{INTRODUCTION}\n" + "\n".join(lines) + "\n"


def documented() -> dict[str, list[str]]:
    """Read the document's columns, by backend."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heads, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert [row[0] for row in rows[1:]] == list(CONVERSATIONS)
    return {head: [row[place] for row in rows[1:]] for place, head in enumerate(heads) if place > 1}


OTHER_EVENTS = {
    "a custom tool": "vLLM gets it as a function with one string argument, and the demo model does not end that string",
    "no parallel calls": "a vLLM worker takes any JSON as the arguments of a forced call of a tool that is not strict; "
    "the demo model writes a list, which is no call, so that the answer ends with an error",
    "a schema or a call": "the answer has the form; a vLLM worker constrains the whole answer to it, so the model cannot "
    "call a tool, unless it runs with `--tool-strict-level parameter`",
}
INTRODUCTION = f"""# Conversations on every backend

`python -m tests.conformance.conversations --write` sends {len(CONVERSATIONS)} conversations of OpenAI's chat API to each backend, each with
`stream` and without. It checks of each answer: the events are in order; the chunks of the stream, joined, are the whole answer;
the events have as many tokens as `usage` says (for Bedrock at least as many, since they are estimates); the prompt has as many
tokens as were counted before admission (not checked for Bedrock, which has its own tokenizer; fewer with allowed tools on vLLM
workers, which get those alone); the arguments of a finished call are JSON.

The column *events* lists the kinds of events of the embedded engine's first choice; the columns after it compare each backend with it. *same*: the same events, text, calls and finish reason; the model is the same.
*same events*: the same kinds of events in the same order and the same finish reason, with other text or arguments,
because the backend constrains the model with another grammar. *refused*: the status is 4xx, and the error names this field. The stand-in of
Bedrock (Claude 3 Haiku) replays the answers of the embedded engine. It also replays reasoning, which the demo model
does not generate.

`python -m tests.conformance.prompt_tokens 1000` counts the prompts of 1,000 random conversations with tools (schemas, histories with calls and results,
many scripts). It sends each as messages to a `vllm serve`, with `max_tokens` 1. The counts equal the worker's `usage`, except for texts that contain
the spelling of a control token such as `<|im_end|>`, which Sluice counts as text.
"""


@asynccontextmanager
async def every_specimen(folder: Path) -> AsyncIterator[dict[str, Specimen]]:
    """Start one specimen of each backend; yield them by name."""
    from tests.conformance.bedrock import bedrock
    from tests.conformance.specimens import embedded, sluice_worker, vllm_serve, vllm_worker
    from tests.conformance.vllm_in_process import vllm_in_process

    async with AsyncExitStack() as stack:
        started = {"embedded engine": await stack.enter_async_context(embedded(folder))}
        vllm = await stack.enter_async_context(vllm_in_process(folder))
        started["vLLM in process"] = vllm.specimen
        url = await asyncio.to_thread(stack.enter_context, vllm_serve(folder))
        started["`vllm serve` worker"] = await stack.enter_async_context(vllm_worker(folder, url, "auto"))
        started["Sluice worker"] = await stack.enter_async_context(sluice_worker(folder))
        started["Bedrock"] = await stack.enter_async_context(bedrock(folder))
        yield started


async def _main(*, write: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with every_specimen(Path(folder)) as specimens:
            first, *_ = specimens
            stored = await run_conversations(specimens[first], {})
            columns = {}
            for head, specimen in specimens.items():
                expected = expected_of(specimen, stored)
                found = await run_conversations(specimen, expected)
                columns[head] = cells_of(found, expected)
                for name, cell in zip(CONVERSATIONS, columns[head], strict=True):
                    if cell.endswith("events"):
                        print(f"{head}: {name}: {cell}: {found[name].kinds} {found[name].choices}")
    text = document(columns, stored)
    print(text)
    if write:
        DOCUMENT.write_text(text, encoding="utf-8")
        stored_fields = {name: asdict(outcome) for name, outcome in stored.items()}
        ANSWERS.write_text(json.dumps(stored_fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_main(write="--write" in sys.argv))
