"""Images in whole journeys: sent to backends that support them, charged, and stored nowhere."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from budgeting.images import ImageCost
from budgeting.values import ImageContent, Message, Role, ToolCall
from gateway.backends.port import BackendState
from gateway.config.images import ImagesSection
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.values import Contract, FinishReason, GenerateRequest
from gateway.images.fetch import Hold, ImageFetcher
from gateway.images.reading import ImageReader
from gateway.requests.body_memory import BodyMemory
from tests.images.samples import data_url, png, sample
from tests.journey.rig import JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
PNG = sample("png")
URL = data_url(PNG)
SHA256 = hashlib.sha256(PNG).hexdigest()
TOKENS = ImageCost().tokens(5, 3)
CACHED = {"fallback": ["response_cache", "degraded"]}


def shown(*urls: str) -> dict[str, Any]:
    """Returns the fields of a chat request with these images."""
    images = [ImageContent(url, param=f"messages.0.content.{at}") for at, url in enumerate(urls, 1)]
    message = Message(Role.USER, "What is this?", parts=("What is this?", *images))
    return {"messages": (message,), "needs": frozenset({Feature.IMAGES}), "contract": Contract.CHAT}


async def test_a_backend_gets_the_image_once_and_its_tokens_are_charged(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    plain = await rig.run(ask("What is this?"))
    sink = await rig.run(ask(**shown(URL, URL)))
    [_, work] = rig.backends["local"].calls
    [message] = work.messages
    assert message.parts == ("What is this?", *[ImageContent(width=5, height=3, sha256=SHA256)] * 2)
    assert work.images == {SHA256: ImageData("image/png", memoryview(b64encode(PNG)), in_base64=True)}
    assert (work.image_tokens, work.input_tokens) == (2 * TOKENS, len(work.token_ids) + 2 * TOKENS)
    assert plain.answer is not None and sink.answer is not None
    counted = [one.answer.budget.recent_turns for one in (plain, sink) if one.answer is not None]
    assert counted[1] == counted[0] + 2 * TOKENS
    billed = rig.outbox.rows[-1].input_tokens
    assert billed == sink.answer.usage.input_tokens == len(work.token_ids), "what the backend reported"
    assert rig.in_use() == []


async def test_an_image_of_a_tools_result_is_charged_as_one_of_the_users(build_rig: Build, ask: Ask) -> None:
    image = ImageContent(URL, param="messages.2.content.0")
    history = (
        Message(Role.USER, "Take a picture."),
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("c", "shoot", "{}"),)),
        Message(Role.TOOL, "", tool_call_id="c", parts=(image,)),
    )
    needs = frozenset({Feature.IMAGES, Feature.TOOLS})
    rig = build_rig()
    await rig.run(ask(messages=history, needs=needs, contract=Contract.CHAT))
    [work] = rig.backends["local"].calls
    assert work.messages[-1].parts == (ImageContent(width=5, height=3, sha256=SHA256),)
    assert work.image_tokens == TOKENS and rig.in_use() == []


async def test_no_record_row_or_trace_has_the_image(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=CACHED)
    await rig.run(ask(**shown(URL)))
    [work] = rig.backends["local"].calls
    pixels = URL.partition(",")[2]
    assert SHA256 in repr(work.messages)
    assert pixels not in repr((work, rig.outbox.rows, rig.records, rig.events))


async def test_a_backend_without_images_is_passed_over_and_alone_refused_by_name(
    build_rig: Build, ask: Ask
) -> None:
    blind = ScriptedBackend("blind", features=frozenset(Feature) - {Feature.IMAGES})
    seeing = ScriptedBackend("seeing")
    weights = [{"name": "blind", "weight": 99}, {"name": "seeing", "weight": 1}]
    both = build_rig(backends=[blind, seeing], route={"backends": weights})
    answer = (await both.run(ask(**shown(URL)))).answer
    assert answer is not None and answer.backend_name == "seeing"
    error = (await build_rig(backends=[blind]).run(ask(**shown("data:no image")))).error
    assert error is not None and (error.status, error.param) == (422, "messages")
    assert error.message.startswith("no backend of this route supports messages with images")
    assert blind.calls == []


async def test_a_broken_image_is_refused_before_a_backend_is_asked(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    error = (await rig.run(ask(**shown(URL, data_url(b"GIF89a"))))).error
    assert error is not None and (error.status, error.param) == (422, "messages.0.content.2")
    assert not rig.backends["local"].calls and not rig.outbox.rows
    assert rig.in_use() == []


@pytest.mark.parametrize("uncached", [False, True])
async def test_an_answer_is_stored_for_the_same_image_alone(
    build_rig: Build, ask: Ask, uncached: bool
) -> None:
    rig = build_rig(route=CACHED)
    await rig.run(ask(**shown(URL)))
    rig.backends["local"].state = BackendState.DEAD
    url = data_url(png(5, 3)) if uncached else URL
    answer = (await rig.run(ask(**shown(url), generation_id="gen_2"))).answer
    assert answer is not None
    assert (answer.finish_reason is FinishReason.DEGRADED) is uncached


async def test_a_fetched_image_counts_as_the_requests_memory_until_its_end(
    build_rig: Build, ask: Ask
) -> None:
    held: list[int] = []

    class Fetcher(ImageFetcher):
        def __init__(self) -> None:
            pass

        async def fetch(self, url: str, tenant: str, hold: Hold) -> bytes:
            hold(len(sample("png")))
            return sample("png")

    rig = build_rig(Script(("one", "two")))
    memory = BodyMemory(1 << 20)
    reader = ImageReader(ImagesSection(), memory.holding, Fetcher())
    rig = replace(rig, journey=replace(rig.journey, images=reader))

    class Sink(RecordingSink):
        async def delta(self, delta: Delta) -> None:
            held.append(memory.held_bytes)

    await rig.journey.run(ask(stream=True, **shown("https://example.org/a.png")), sink := Sink())
    assert sink.answer is not None
    assert rig.backends["local"].calls[0].images == {SHA256: ImageData("image/png", memoryview(PNG))}
    assert len(held) >= 2 and set(held) == {len(PNG)}
    assert memory.held_bytes == 0


@virtual_time
async def test_a_deadline_that_passes_while_an_image_is_fetched_ends_the_fetch_and_frees_its_memory(
    build_rig: Build, ask: Ask
) -> None:
    class Fetcher(ImageFetcher):
        ended = False

        def __init__(self) -> None:
            pass

        async def fetch(self, url: str, tenant: str, hold: Hold) -> bytes:
            hold(1_000)
            try:
                await asyncio.sleep(3_600)
            finally:
                self.ended = True
            return b""

    rig, memory, fetcher = build_rig(Script(("one",))), BodyMemory(1 << 20), Fetcher()
    reader = ImageReader(ImagesSection(), memory.holding, fetcher, clock=loop_time)
    rig = replace(rig, journey=replace(rig.journey, images=reader))
    request = ask(deadline=loop_time() + 0.05, **shown("https://example.org/a.png"))
    await rig.journey.run(request, sink := RecordingSink())
    assert sink.error is not None
    assert (sink.error.status, sink.error.code) == (504, "deadline_exceeded")
    assert sink.error.message == "the deadline passed before its images had been read"
    assert fetcher.ended and memory.held_bytes == 0
