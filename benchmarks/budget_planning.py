"""What planning a prompt costs, against one tokenization of it: ``python -m benchmarks.budget_planning``.

A conversation of about 3,600 tokens, system part and context included, is planned

* warm: every message was planned before, but the latest turn and the context are new each time;
* cold: with empty caches;
* agent: with 10 tools and 20 calls with their results, 12,000 tokens, all but the latest turn planned before;
* trimmed: with twice as many turns as the model has room for, so that older turns are summarized.

The same rounds also measure one full tokenization of the first prompt's rendered text by ``tokenizers``. With
``--template FILE`` the prompts are rendered by another model's chat template. Then ``--conversations``
different conversations go through one planner, and the memory of its caches is read.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from msgspec.structs import replace
from tokenizers import Tokenizer

from budgeting.counting import CACHE_BYTES, ChatTokenizer
from budgeting.plan import BudgetPlanner
from budgeting.sections import prompt_messages
from budgeting.values import BudgetRequest, CanonicalPrompt, Message, Role, SectionBudgets, Tool, ToolCall
from gateway.limited.process import LimitedProcess, Limits
from gateway.prompts.bounded_work import RENDER, render_in

MODEL_LEN = 4_096
TOKENS = 3_600
ANSWER = 300
SEED = 11

SENTENCES = (
    "Which manga should I read after Vinland Saga, if I liked the story and the calm parts most?",
    "I would start with volume 1 of Vagabond; it is in stock and ships within two days.",
    "Returns are free for thirty days, as long as the seal of the box is not broken.",
    "何かお勧めはありますか。静かな話が好きです。",
    "在庫はあります。明日発送できます。",
    "My order has not arrived yet, and the tracking page shows nothing since Monday.",
    "Please give me the order number, then I can look where the parcel is at the moment.",
    "The box set has twelve volumes and costs less than the single ones together.",
)
SYSTEM = (
    "You are a manga shopping assistant.\n\nAnswer from the catalog and the evidence given. If you do not "
    "know, say so. Keep answers short and friendly.\n\nFollow catalog grounding rules.",
)


def turn(chance: random.Random, role: Role) -> Message:
    """A message of two to five sentences, unlike any other."""
    words = " ".join(chance.choices(SENTENCES, k=chance.randint(2, 5)))
    return Message(role, f"{words} (order {chance.randrange(10**9)})")


def conversation(tokenizer: ChatTokenizer, chance: random.Random, tokens: int) -> CanonicalPrompt:
    """Return a conversation of at most ``tokens`` tokens that ends with a user turn."""
    turns: list[Message] = []
    size = 0
    while size < tokens:
        pair = (turn(chance, Role.USER), turn(chance, Role.ASSISTANT))
        size += sum(tokenizer.message_tokens(message) for message in pair)
        turns += pair
    return CanonicalPrompt(
        system=SYSTEM,
        turns=(*turns[:-2], Message(Role.USER, "And now?")),
        context="locale: ja\ntime: 2026-11-20T10:00:00Z",
    )


def agents_prompt(chance: random.Random) -> CanonicalPrompt:
    """Return the conversation of an agent: tools, calls and results."""
    schema = json.dumps({"type": "object", "properties": {"title": {"type": "string"}}})
    tools = [
        Tool(f"tool_{number}", description=turn(chance, Role.USER).content, parameters=schema)
        for number in range(10)
    ]
    turns = [turn(chance, Role.USER)]
    for number in range(20):
        call = ToolCall(f"call_{number}", f"tool_{number % 10}", json.dumps({"title": str(number)}))
        turns.append(Message(Role.ASSISTANT, "", (call,)))
        result = " ".join(turn(chance, Role.TOOL).content for _ in range(4))
        turns.append(Message(Role.TOOL, result, tool_call_id=call.id))
    turns += [turn(chance, Role.ASSISTANT), turn(chance, Role.USER)]
    return CanonicalPrompt(system=SYSTEM, turns=tuple(turns), tools=tuple(tools))


def with_template(folder: Path, template: Path, place: Path) -> Path:
    """Return a copy of a model's folder with another chat template, whose control tokens it has."""
    source = template.read_text()
    data = json.loads((folder / "tokenizer.json").read_text())
    known = {token["content"] for token in data["added_tokens"]}
    size = max(*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])) + 1
    missing = sorted(set(re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", source)) - known)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] += [
        {"id": size + place, "content": content, "special": True, **flags}
        for place, content in enumerate(missing)
    ]
    (place / "tokenizer.json").write_text(json.dumps(data))
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    (place / "chat_template.jinja").write_text(source)
    return place


def afresh(prompt: CanonicalPrompt, number: int) -> CanonicalPrompt:
    """Return the conversation as the next request sends it: new objects, another latest turn and context."""
    turns = [replace(one, content=one.content.encode().decode()) for one in prompt.turns[:-1]]
    return CanonicalPrompt(
        system=tuple(text.encode().decode() for text in prompt.system),
        tools=prompt.tools,
        turns=(*turns, Message(Role.USER, f"And what about number {number}, is it in stock?")),
        context=f"locale: ja\ntime: 2026-11-20T10:{number // 60 % 60:02}:{number % 60:02}Z",
    )


@dataclass(frozen=True, slots=True)
class CallTime:
    """Milliseconds of one call: wall time, and CPU time, which other work on the machine hardly changes."""

    wall: float
    cpu: float


def clocked(work: Callable[[], object]) -> CallTime:
    """Return the times of one call."""
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    return CallTime((time.perf_counter() - began) * 1000, (time.process_time() - began_cpu) * 1000)


def median_cpu(times: Sequence[CallTime]) -> float:
    """Return the median CPU time, in milliseconds."""
    return statistics.median(one.cpu for one in times)


def print_times(name: str, times: Sequence[CallTime], full_ms: float) -> None:
    """Print one line: percentiles of both times, and the median CPU time over one full tokenization's."""
    shown = []
    for ordered in (sorted(one.wall for one in times), sorted(one.cpu for one in times)):
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        shown.append(f"p50 {statistics.median(ordered):7.3f}  p99 {p99:7.3f}")
    ratio = median_cpu(times) / full_ms
    print(f"{name:36} wall {shown[0]}   cpu {shown[1]} ms   {ratio:6.3f} of a full tokenization")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo", help="folder with a tokenizer")
    parser.add_argument("--template", type=Path, help="file with another model's chat template")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--conversations", type=int, default=100_000, help="of 12 turns, for the memory")
    options = parser.parse_args()

    with contextlib.ExitStack() as stack:
        folder = Path(options.model)
        if options.template is not None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = with_template(folder, options.template, place)
        templates = LimitedProcess(RENDER, str(folder), limits=Limits())
        stack.callback(templates.close)
        measure(lambda: ChatTokenizer(folder, elsewhere=render_in(templates, folder)), folder, options)


def measure(read: Callable[[], ChatTokenizer], folder: Path, options: argparse.Namespace) -> None:
    """Measure and print, with the tokenizer that ``read`` returns."""
    chance = random.Random(SEED)
    tokenizer = read()
    planner = BudgetPlanner(tokenizer, max_model_len=MODEL_LEN)
    agents = BudgetPlanner(tokenizer, max_model_len=16 * MODEL_LEN)
    prompt = conversation(tokenizer, chance, TOKENS)
    long = conversation(tokenizer, chance, 2 * MODEL_LEN)
    plan = planner.plan(BudgetRequest(prompt, max_tokens=ANSWER))
    text = tokenizer.decode(plan.token_ids)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    agent = agents_prompt(chance)
    print(
        f"{plan.counts.total} tokens, {len(prompt.turns)} turns, {len(text)} characters; "
        f"encoder: {tokenizer.encoder}; message by message: {tokenizer.per_message}"
    )
    trimmed = planner.plan(BudgetRequest(long, max_tokens=ANSWER, budgets=SectionBudgets()))
    print(f"trimmed: {trimmed.dropped_turns} of {len(long.turns)} turns dropped, counts {trimmed.counts}")

    full, warm, cold, cut, called = [], [], [], [], []
    gc.collect()
    gc.freeze()
    for number in range(options.rounds):
        request = BudgetRequest(afresh(prompt, number), max_tokens=ANSWER)
        warm.append(clocked(lambda request=request: planner.plan(request)))  # type: ignore[misc]
        request = BudgetRequest(afresh(long, number), max_tokens=ANSWER, budgets=SectionBudgets())
        cut.append(clocked(lambda request=request: planner.plan(request)))  # type: ignore[misc]
        request = BudgetRequest(afresh(agent, number), max_tokens=ANSWER)
        called.append(clocked(lambda request=request: agents.plan(request)))  # type: ignore[misc]
        if number % 10 == 0:
            full.append(clocked(lambda: reference.encode_batch_fast([text], add_special_tokens=False)))
    for number in range(max(1, options.rounds // 20)):
        # The planner's caches are empty; the reference tokenizer keeps its cache of words.
        fresh = read()
        cold_planner = BudgetPlanner(fresh, max_model_len=MODEL_LEN)
        request = BudgetRequest(afresh(prompt, number), max_tokens=ANSWER)
        cold.append(clocked(lambda request=request, one=cold_planner: one.plan(request)))  # type: ignore[misc]
    full_ms = median_cpu(full)
    print_times("one full tokenization", full, full_ms)
    print_times("planned, all but the last turn seen", warm, full_ms)
    print_times("planned, an agent's prompt", called, full_ms)
    print_times("planned, cold", cold, full_ms)
    print_times("planned, trimmed and summarized", cut, full_ms)

    gc.unfreeze()
    process = psutil.Process()
    began_rss, highest = process.memory_info().rss, 0
    for _ in range(options.conversations):
        turns = [turn(chance, role) for role in (Role.USER, Role.ASSISTANT) * 5]
        tokenizer.encode_chat(prompt_messages(CanonicalPrompt(system=SYSTEM, turns=tuple(turns))))
        highest = max(highest, tokenizer.cache_bytes)
    grown = process.memory_info().rss - began_rss
    print(
        f"{options.conversations} conversations: caches say {highest / 2**20:.1f} MiB at most "
        f"(bound {CACHE_BYTES / 2**20:.0f} MiB); the process grew by {grown / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
