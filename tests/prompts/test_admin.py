from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import orjson
import pytest
from msgspec.structs import replace

from adapters.registry import AdapterRegistry
from budgeting.counting import ChatTokenizer
from budgeting.errors import ContextTooLong
from budgeting.images import ImageCost
from budgeting.summary import Count, Summarizer, Summary
from budgeting.values import EvidenceChunk, ImageContent, Message, Role, SummaryKind
from gateway.admin.prompts import PromptAdmin
from gateway.backends.port import Fleet
from gateway.config.images import ImagesSection
from gateway.contracts.features import Feature
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest, Sampling
from gateway.errors import InvalidRequest, UnknownPromptVersion, UnknownRoute
from gateway.images.reading import ImageReader
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.published import Publishing
from gateway.prompts.text import Models, ModelText
from gateway.prompts.versions import PromptVersions
from gateway.requests.body_memory import BodyMemory
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from gateway.state.memory import MemoryStateStore
from tests.budgeting import folders
from tests.images.samples import data_url, sample
from tests.scripted import ScriptedBackend

ROOT = Path(__file__).parents[2]
SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT


def admin_of(
    tokenizer: ChatTokenizer,
    max_model_len: int = 4096,
    *,
    folder: Path = ROOT / "prompts",
    summarizers: Mapping[SummaryKind, Summarizer] = MappingProxyType({}),
) -> PromptAdmin:
    versions = PromptVersions.from_folder(folder)
    backends = {"local": ScriptedBackend()}
    [prompt_version] = versions.ids
    route = {"backends": [{"name": "local", "weight": 100}], "prompt_version": prompt_version}
    revision = make_revision(
        1, {"routes": {"self_hosted_generation": route}}, KnownNames(backends, versions.ids, ())
    )
    text = ModelText(tokenizer, max_model_len, Canonicalizer())
    for kind, summarizer in summarizers.items():
        text.summarizers[kind] = summarizer
    return PromptAdmin(
        registry=versions,
        publishing=Publishing(versions, MemoryStateStore(unix_time=time.time), unix_time=lambda: 0.0),
        canonicalizer=Canonicalizer(),
        models=Models(text),
        images=ImageReader(ImagesSection(), BodyMemory(1 << 20).holding),
        revision=lambda: revision,
        fleet=Fleet(backends),
        adapters=AdapterRegistry(),
    )


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(ROOT / "models" / "demo")


@pytest.fixture
def admin(tokenizer: ChatTokenizer) -> PromptAdmin:
    return admin_of(tokenizer)


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    def make(**changes: object) -> GenerateRequest:
        request = GenerateRequest(
            request_id="req_1",
            generation_id="gen_1",
            contract=Contract.NATIVE,
            caller=Caller("ops", CallerRole.ADMIN, "key_1"),
            arrived_at=0.0,
            created=0,
            messages=(
                Message(SYSTEM, "Speak French. Today is 2026-11-20."),
                Message(USER, "hi"),
                Message(ASSISTANT, "hello"),
                Message(USER, "which one?"),
            ),
            chunks=(EvidenceChunk("m1", "catalog", "Berserk, in stock."),),
            context={"locale": "ja"},
        )
        return replace(request, **changes)  # type: ignore[arg-type]

    return make


Ask = Callable[..., GenerateRequest]


async def test_a_preview_shows_what_would_be_sent_with_the_boundary_marked(
    admin: PromptAdmin, ask: Ask, tokenizer: ChatTokenizer
) -> None:
    found = orjson.loads(orjson.dumps(await admin.preview(ask())))
    assert found["route"] == "self_hosted_generation"
    assert found["prompt_version"]["id"] == "chat-manga-2.1"
    before, after = found["prompt"]["before_boundary"], found["prompt"]["after_boundary"]
    assert "manga shopping assistant" in before and "Speak French." in before
    assert "2026-11-20" not in before
    assert after.index("hello") < after.index("Berserk") < after.index("2026-11-20") < after.index("which")
    counts = {name: section["tokens"] for name, section in found["sections"].items()}
    assert sum(counts.values()) == found["input_tokens"]
    assert found["prefix"]["tokens"] == counts["system"] == len(tokenizer.encode(before))
    assert found["prefix"]["blocks"] == counts["system"] // 16
    assert len(found["prefix"]["fingerprint"]) == 16
    sections = [message["section"] for message in found["messages"]]
    assert sections == ["system"] * 2 + ["recent_turns"] * 2 + ["retrieval", "recent_turns"]


async def test_a_preview_names_what_is_volatile_and_what_became_of_it(admin: PromptAdmin, ask: Ask) -> None:
    moved = await admin.preview(ask())
    finding = {"kind": "date", "text": "2026-11-20", "sentence": "Today is 2026-11-20.", "system_message": 0}
    assert moved["volatile"] == {"policy": "move", "findings": [{**finding, "action": "moved"}]}
    reported = await admin.preview(ask(contract=Contract.CHAT, route="self_hosted_generation"))
    assert reported["volatile"] == {"policy": "report", "findings": [{**finding, "action": "reported"}]}


async def test_the_fingerprint_does_not_change_with_time_and_does_with_the_text(
    admin: PromptAdmin, ask: Ask
) -> None:
    def system(text: str) -> tuple[Message, ...]:
        return (Message(SYSTEM, text), Message(USER, "hi"))

    one, two, three = [
        (await admin.preview(ask(messages=system(text))))["prefix"]
        for text in (
            "Speak French. Today is 2026-11-20.",
            "Speak French.\r\nToday is 2026-11-21. ",
            "Speak only French, and nothing else, whatever you are asked.",
        )
    ]
    assert one == two != three


async def test_a_preview_tells_what_does_not_fit(tokenizer: ChatTokenizer, ask: Ask) -> None:
    chunks = tuple(EvidenceChunk(f"m{n}", "catalog", f"Volume {n} of it. " * 20, n / 10) for n in range(9))
    found = await admin_of(tokenizer, 600).preview(ask(chunks=chunks, sampling=Sampling(max_tokens=100)))
    cuts = found["cuts"]
    assert isinstance(cuts, dict) and cuts["dropped_chunks"] and "m8" not in cuts["dropped_chunks"]
    assert found["generation_reserve"] == 100


class NeverAsked:
    """A summarizer that would have a summary written; a preview must not call it."""

    def summarize(
        self, turns: Sequence[Message], *, max_tokens: int, count: Count, owner: str = ""
    ) -> Summary | None:
        raise AssertionError("a preview has a summary written")


async def test_a_preview_has_no_summary_written(tokenizer: ChatTokenizer, ask: Ask, tmp_path: Path) -> None:
    budgets = "{system: 50, retrieval: 50, recent_turns: 100, older_summary: 200}"
    body = f"id: v\nsystem: Hi.\nsummarizer: engine\nbudgets: {budgets}\n"
    (tmp_path / "v.yaml").write_text(body, encoding="utf-8")
    admin = admin_of(tokenizer, 600, folder=tmp_path, summarizers={SummaryKind.ENGINE: NeverAsked()})
    turns = [
        Message(role, f"Number {n} is about {role.value} things.")
        for n in range(40)
        for role in (USER, ASSISTANT)
    ]
    found = await admin.preview(ask(messages=(*turns, Message(USER, "hi")), sampling=Sampling(max_tokens=50)))
    assert isinstance(found["cuts"], dict) and found["cuts"]["summarized_turns"] > 0
    sections = [message["section"] for message in found["messages"]]  # type: ignore[attr-defined]
    assert sections[:2] == ["system", "older_summary"]


async def test_a_preview_meets_the_errors_that_the_request_would(admin: PromptAdmin, ask: Ask) -> None:
    with pytest.raises(UnknownRoute):
        await admin.preview(ask(route="nowhere"))
    with pytest.raises(UnknownPromptVersion):
        await admin.preview(ask(prompt_version="nothing"))
    with pytest.raises(ContextTooLong):
        await admin.preview(ask(messages=(Message(USER, "long " * 9_000),)))


async def test_where_the_template_takes_no_later_system_message_the_preview_shows_the_turn_as_it_is_sent(
    tmp_path: Path, ask: Ask
) -> None:
    folder = folders.write_folder(
        tmp_path / "m",
        folders.byte_level(["<s>", "</s>"]),
        folders.ALTERNATING,
        bos_token="<s>",
        eos_token="</s>",
    )
    found = await admin_of(ChatTokenizer(folder)).preview(ask())
    sections = [message["section"] for message in found["messages"]]  # type: ignore[attr-defined]
    assert sections == ["system", "recent_turns", "recent_turns", "recent_turns"]
    counts = found["sections"]
    assert isinstance(counts, dict) and counts["retrieval"]["tokens"] > 0


def test_versions_are_listed_with_the_routes_that_use_them(admin: PromptAdmin) -> None:
    [listed] = orjson.loads(orjson.dumps(admin.versions()))
    assert (listed["id"], listed["routes"]) == ("chat-manga-2.1", ["self_hosted_generation"])
    assert len(listed["sha256"]) == 64 and listed["published_at"] is None


def test_one_version_is_shown_whole_and_an_unknown_one_is_refused(admin: PromptAdmin) -> None:
    shown = orjson.loads(orjson.dumps(admin.version("chat-manga-2.1")))
    assert shown["stable_text"].startswith("You are a manga shopping assistant.\n\nAnswer from")
    assert shown["budgets"]["retrieval"] == 1400 and shown["summarizer"] == "extractive"
    with pytest.raises(UnknownPromptVersion):
        admin.version("nothing")


async def test_images_are_counted_as_they_are_planned(
    admin: PromptAdmin, ask: Callable[..., GenerateRequest]
) -> None:
    image = ImageContent(data_url(sample("png")), param="messages.0.content.0.image_url.url")
    plain = Message(USER, "What is this?")
    seen = Message(USER, "What is this?", parts=("What is this?", image))
    needs = frozenset({Feature.IMAGES})
    counts = [
        await admin.count(ask(messages=(message,), needs=needs), asyncio.to_thread)
        for message in (plain, seen)
    ]
    assert counts[1] == counts[0] + ImageCost().tokens(5, 3)
    blind = ScriptedBackend(features=frozenset())
    other = dataclasses.replace(admin, fleet=Fleet({"local": blind}))
    with pytest.raises(InvalidRequest, match="takes no images"):
        await other.count(ask(messages=(seen,), needs=needs), asyncio.to_thread)
