"""What canonical prompts gain in the prefix cache: conversations whose every request has a timestamp.

    python -m benchmarks.prompt_cache
    python -m benchmarks.prompt_cache --conversations 20 --turns 10 --json
    python -m benchmarks.prompt_cache --engine vllm --block-size 32
    python -m benchmarks.prompt_cache --cost

Callers put the time and a request id at the top of their system message, as many do. The same conversations
run twice through one gateway and one engine, in turn, under two prompt versions that differ in ``volatile``
alone: ``move`` (canonical) and ``off`` (naive: sent as written). The two are separate tenants, so neither
finds what the other has computed. Answers are the model's own and become part of the next request.

Two ideals are computed from the conversations, in tokens of their messages, without blocks, engine or cache.
``order`` is what can be shared when the timestamp is right before the latest turn: the system text and the
turns that preceded the timestamp in an earlier request. ``seen`` counts everything sent or answered before,
as if there were no timestamp. No prefix cache can reach it with the timestamp there: the last question and
its answer were computed after an old timestamp.

``--cost`` runs no engine: it measures how long it takes to make a system text of 2.5 KB canonical, when it
was seen before and when one line is new and volatile.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from budgeting.template import GENERATES
from budgeting.values import Message, Plan, Role
from gateway.config.settings import Settings, load_settings
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest, Sampling
from gateway.errors import PublicError
from gateway.prompts.canonical import Canonicalizer
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.logs import configure_logging

WORDS = [
    *(
        "manga",
        "volume",
        "series",
        "shipping",
        "returns",
        "stock",
        "author",
        "genre",
        "recommend",
        "adventure",
    ),
    *("drama", "story", "reader", "order", "price", "catalog", "box", "set", "edition", "cover", "art"),
    *("chapter", "shelf", "new", "classic", "popular", "finished", "running", "gift"),
]
ARMS = {"canonical": "move", "naive": "off"}
START = datetime(2026, 11, 20, 10, 0, 0, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one arm. Shares are of all prompt tokens, 0 to 1; times: requests after the first."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    ideal_order_share: float
    ideal_seen_share: float
    of_ideal_order: float
    of_ideal_seen: float
    ttft_ms_p50: float
    ttft_ms_mean: float


class KeepingSink:
    """A sink that stores the answer."""

    answer: Answer | None = None
    discarded = False

    def planned(self, plan: Plan, model: str) -> None:
        """Ignore the plan."""

    async def delta(self, delta: Delta) -> None:
        """Ignore the delta: the answer has the whole text."""

    async def finish(self, answer: Answer) -> None:
        """Store the answer."""
        self.answer = answer

    async def fail(self, error: PublicError) -> None:
        """Raise: no request of the benchmark may fail."""
        raise RuntimeError(f"{error.code}: {error.message}")


class Conversation:
    """One conversation in one arm: its messages, and which of them the canonical order can share."""

    def __init__(self, gateway: Gateway, arm: str, number: int, questions: list[str], rules: str) -> None:
        self._gateway = gateway
        self._arm = arm
        self._number = number
        self._questions = questions
        self._rules = rules
        self._turns: list[Message] = []
        self._before: list[Message] | None = None

    async def step(self, at: datetime, output_tokens: int, known: bool) -> tuple[Answer, int, int]:
        """Send one request; return the answer, and the tokens of both ideals.

        Args:
            at: the time that the caller writes into its system message.
            output_tokens: maximum of the answer.
            known: whether the arm has sent the system text before.
        """
        question = Message(Role.USER, self._questions[len(self._turns) // 2])
        request_id = f"req_{random.Random(f'{self._arm}{self._number}{at}').getrandbits(48):012x}"
        system = Message(
            Role.SYSTEM, f"Current time: {at.isoformat()}\nRequest: {request_id}\n\n{self._rules}"
        )
        sink = KeepingSink()
        await self._gateway.services.journey.run(
            GenerateRequest(
                request_id=request_id,
                generation_id=request_id,
                contract=Contract.NATIVE,
                caller=Caller(self._arm, CallerRole.CALLER, "bench"),
                arrived_at=time.monotonic(),
                created=0,
                messages=(system, *self._turns, question),
                prompt_version=self._arm,
                session_id=f"session_{self._number}",
                sampling=Sampling(max_tokens=output_tokens, temperature=0.0),
            ),
            sink,
        )
        assert sink.answer is not None
        stable = [Message(Role.SYSTEM, STABLE), Message(Role.SYSTEM, self._rules)]
        order = await self._tokens([*stable, *(self._before or [])]) if known else 0
        seen = await self._tokens([*stable, *self._turns]) if known else 0
        self._before = list(self._turns)
        self._turns += [question, Message(Role.ASSISTANT, sink.answer.output_text)]
        return sink.answer, order, seen

    async def _tokens(self, messages: list[Message]) -> int:
        text = self._gateway.services.text("")
        return len(text.encode_chat(messages, kwargs={GENERATES: False}))


STABLE = "You are a manga shopping assistant."


async def measure(
    settings: Settings, conversations: int, turns: int, output_tokens: int, seed: int
) -> dict[str, Figures]:
    """Measure the figures of both arms."""
    gateway = build(settings, admin_key=None)
    rng = random.Random(seed)
    rules = "\n".join(f"- {' '.join(rng.choices(WORDS, k=14))}." for _ in range(20))
    taken: dict[str, list[tuple[Answer, int, int]]] = {arm: [] for arm in ARMS}
    at = START
    async with gateway.running():
        while not gateway.services.health.ready()[0]:  # noqa: ASYNC110 readiness is polled, on purpose
            await asyncio.sleep(0.05)
        for number in track(range(conversations), description="conversations", console=Console(stderr=True)):
            questions = [" ".join(rng.choices(WORDS, k=24)) + "?" for _ in range(turns)]
            talks = {arm: Conversation(gateway, arm, number, questions, rules) for arm in ARMS}
            for turn in range(turns):
                at += timedelta(seconds=rng.randint(1, 90))
                # In turn and in alternating order, so that neither arm always runs in quieter moments.
                for arm in sorted(ARMS, reverse=turn % 2 == 1):
                    known = bool(taken[arm])
                    taken[arm].append(await talks[arm].step(at, output_tokens, known))
    return {arm: figures(answers) for arm, answers in taken.items()}


def figures(taken: list[tuple[Answer, int, int]]) -> Figures:
    """Return the figures of one arm."""
    prompt = sum(answer.usage.input_tokens for answer, _, _ in taken)
    cached = sum(answer.usage.cached_tokens for answer, _, _ in taken)
    order, seen = sum(one[1] for one in taken), sum(one[2] for one in taken)
    ttft = [answer.timings.ttft_ms for answer, _, _ in taken[1:] if answer.timings.ttft_ms is not None]
    return Figures(
        requests=len(taken),
        prompt_tokens=prompt,
        cached_tokens=cached,
        cached_share=cached / prompt,
        ideal_order_share=order / prompt,
        ideal_seen_share=seen / prompt,
        of_ideal_order=cached / order,
        of_ideal_seen=cached / seen,
        ttft_ms_p50=statistics.median(ttft),
        ttft_ms_mean=statistics.fmean(ttft),
    )


def cost_us(rounds: int = 2_000) -> dict[str, float]:
    """Median microseconds of making one request's messages canonical."""
    rng = random.Random(7)
    rules = "\n".join(f"- {' '.join(rng.choices(WORDS, k=13))}, at most {n}." for n in range(26))
    caller = Caller("bench", CallerRole.CALLER, "bench")
    canonicalizer = Canonicalizer()
    found = {}
    for name, line in (("seen before", ""), ("one line new and volatile", "Current time: {}\n")):
        took = []
        for number in range(rounds):
            system = line.format((START + timedelta(seconds=number)).isoformat()) + rules
            messages = (Message(Role.SYSTEM, system), Message(Role.USER, "hi"))
            request = GenerateRequest("r", "g", caller, 0.0, 0, contract=Contract.NATIVE, messages=messages)
            began = time.perf_counter()
            canonicalizer.canonical(request, None)
            took.append(time.perf_counter() - began)
        found[name] = statistics.median(took) * 1e6
    return found


def versions_in(folder: Path) -> None:
    """Write two prompt versions that differ in how volatile content is handled."""
    for arm, policy in ARMS.items():
        body = {"id": arm, "system": STABLE, "volatile": policy}
        (folder / f"{arm}.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")


def main(
    conversations: Annotated[int, typer.Option(min=1, help="How many, one after the other.")] = 12,
    turns: Annotated[int, typer.Option(min=2, help="Requests of each.")] = 10,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 24,
    engine: Annotated[str, typer.Option(help="embedded or vllm.")] = "embedded",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 7,
    cost: Annotated[bool, typer.Option("--cost", help="Only what making a text canonical takes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the cached share and the time to the first token, canonical against naive order."""
    if cost:
        print(json.dumps({name: round(us, 1) for name, us in cost_us().items()}, indent=2))
        return
    logs = configure_logging("error")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts"
        prompts.mkdir()
        versions_in(prompts)
        routing = folder / "routing.yaml"
        backends = [{"name": "local", "weight": 100}]
        routing.write_text(yaml.safe_dump({"routes": {"self_hosted_generation": {"backends": backends}}}))
        settings = load_settings(
            None,
            {
                "SLUICE_AUTH__ENABLED": "false",
                "SLUICE_ENGINE__KIND": engine,
                "SLUICE_ENGINE__BLOCK_SIZE": str(block_size),
                "SLUICE_PROMPTS__FOLDER": str(prompts),
                "SLUICE_ROUTING__FILE": str(routing),
                "SLUICE_STATE__URL": f"sqlite:///{folder}/s.db",
                "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/l.db",
            },
        )
        arms = asyncio.run(measure(settings, conversations, turns, output_tokens, seed))
    logs.close()
    ratio = arms["canonical"].ttft_ms_p50 / arms["naive"].ttft_ms_p50
    setup = {"engine": engine, "block_size": block_size, "conversations": conversations, "turns": turns}
    if as_json:
        shown = {arm: asdict(one) for arm, one in arms.items()}
        print(json.dumps({"setup": setup, "arms": shown, "ttft_ratio": ratio}, indent=2))
        return
    table = Table(title=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setup.items()))
    columns = (
        "prompt tokens",
        "cached",
        "ideal (order)",
        "of it",
        "ideal (seen)",
        "of it",
        "TTFT p50 ms",
        "mean",
    )
    table.add_column("order")
    for heading in columns:
        table.add_column(heading, justify="right")
    for arm, one in arms.items():
        table.add_row(
            arm, f"{one.prompt_tokens:,}", f"{one.cached_share:.1%}", f"{one.ideal_order_share:.1%}",
            f"{one.of_ideal_order:.1%}", f"{one.ideal_seen_share:.1%}", f"{one.of_ideal_seen:.1%}",
            f"{one.ttft_ms_p50:.1f}", f"{one.ttft_ms_mean:.1f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(f"TTFT p50, canonical to naive: {ratio:.2f}")


if __name__ == "__main__":
    typer.run(main)
