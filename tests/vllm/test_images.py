"""Images for vLLM in process: vLLM renders conversations with images; the model does not run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from budgeting.counting import ChatTokenizer
from budgeting.values import ImageContent, Message, Role
from gateway.backends.port import Completion, PartialAnswer, Work
from gateway.backends.vllm.compat import start
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.parser_names import ParserNames
from gateway.contracts.events import Delta
from gateway.contracts.images import ImageData
from gateway.contracts.values import FinishReason, Sampling
from resilience.failures import BackendFailure, FailureKind
from tests.images.samples import png, sample
from tests.vllm.conftest import needs_vllm
from tests.vllm.vision_model import COST, write_vision_model

pytestmark = needs_vllm

SAMPLING = Sampling(max_tokens=4, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)


class Scripted:
    """The part of ``AsyncLLM`` that a request uses: the renderer is vLLM's own, the answer is one token."""

    def __init__(self, config: Any, renderer: Any) -> None:
        self.vllm_config = config
        self.renderer = renderer
        self.tokenizer = renderer.get_tokenizer()
        self.prompts: list[Any] = []
        decoder = SimpleNamespace(decode=None, ext_hook=None, dec_hook=None)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue(), decoder=decoder)
        self.output_processor = SimpleNamespace(request_states={})

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.prompts.append(prompt)
        one = SimpleNamespace(
            index=0, text="A", token_ids=[7], logprobs=None, finish_reason="stop", stop_reason=None
        )
        collector = RequestOutputCollector(params.output_kind, request_id)
        collector.put(SimpleNamespace(outputs=[one], metrics=None, num_cached_tokens=0, finished=True))
        return collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Scripted]:
    start.prepare_environment(None)
    start.load(start.installed_version(), lambda: None)
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration as Model
    from vllm.renderers import renderer_from_config

    ModelRegistry.register_model(Model.__name__, Model)  # else vLLM inspects the class in another process
    arguments = AsyncEngineArgs(
        model=str(folder), max_model_len=512, dtype="float32", block_size=32, enforce_eager=True
    )
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)
    yield Scripted(config, renderer)
    renderer.shutdown()


@pytest.fixture(scope="module")
def engine(llm: Scripted) -> VllmEngine:
    return VllmEngine(llm, "0", lambda token: b"A", 0, ParserNames(), SignalBoard())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder)


def work(tokenizer: ChatTokenizer, data: bytes, width: int = 5, height: int = 3) -> Work:
    sha256 = hashlib.sha256(data).hexdigest()
    parts = ("This", ImageContent(width=width, height=height, sha256=sha256), "?")
    asked = (Message(Role.SYSTEM, "Look."), Message(Role.USER, "This?", parts=parts))
    return Work(
        generation_id="gen",
        token_ids=tokenizer.encode_chat([one.without_parts for one in asked]),
        messages=asked,
        sampling=SAMPLING,
        images={sha256: ImageData("image/png", memoryview(data))},
        image_tokens=COST.tokens(width, height),
    )


async def answered(engine: VllmEngine, asked: Work, **changes: Any) -> Completion:
    async def drop(delta: Delta) -> None:
        """Discards the delta."""

    return await engine.run(replace(asked, cache_salt="acme", **changes), drop)


def test_whether_the_model_takes_images_is_a_part_of_its_shape(engine: VllmEngine) -> None:
    assert engine.shape.takes_images


@pytest.mark.parametrize("name", ["png", "jpeg", "gif", "webp"])
async def test_a_prompt_with_an_image_has_the_tokens_that_were_planned(
    engine: VllmEngine, llm: Scripted, tokenizer: ChatTokenizer, name: str
) -> None:
    asked = work(tokenizer, sample(name))
    done = await answered(engine, asked)
    assert done.usage.input_tokens == asked.input_tokens == len(asked.token_ids) + COST.tokens(5, 3)
    assert done.finish_reason is FinishReason.STOP
    prompt = llm.prompts[-1]
    [place] = prompt["mm_placeholders"]["image"]
    before, after = place.offset, place.offset + place.length
    assert prompt["cache_salt"] == "acme" and place.length == asked.image_tokens
    said = [
        llm.tokenizer.decode(prompt["prompt_token_ids"][part]) for part in (slice(before), slice(after, None))
    ]
    assert said[0].endswith("user\nThis") and said[1].startswith("?<|im_end|>")


async def test_an_image_of_a_tools_result_is_rendered_as_one_of_the_users(
    engine: VllmEngine, tokenizer: ChatTokenizer
) -> None:
    asked = work(tokenizer, sample("png"))
    [system, seen] = asked.messages
    result = replace(seen, role=Role.TOOL, tool_call_id="c")
    asked = replace(asked, messages=(system, result))
    assert (await answered(engine, asked)).usage.input_tokens == asked.input_tokens


async def test_a_partial_answer_follows_the_prompt_with_its_images(
    engine: VllmEngine, llm: Scripted, tokenizer: ChatTokenizer
) -> None:
    asked = work(tokenizer, sample("png"))
    done = await answered(engine, asked, partial=PartialAnswer("It", (300, 301)))
    assert done.usage.input_tokens == asked.input_tokens
    assert llm.prompts[-1]["prompt_token_ids"][-2:] == [300, 301]


@pytest.mark.parametrize("data", [png(500, 500), sample("jpeg")[:150]], ids=["pixels", "end"])
async def test_an_image_that_cannot_be_decoded_is_the_callers_fault(
    engine: VllmEngine, tokenizer: ChatTokenizer, data: bytes
) -> None:
    with pytest.raises(BackendFailure) as failed:
        await answered(engine, work(tokenizer, data))
    assert (failed.value.kind, failed.value.param) == (FailureKind.INVALID_INPUT, "messages")


async def test_several_requests_with_images_are_rendered_at_a_time(
    engine: VllmEngine, tokenizer: ChatTokenizer
) -> None:
    asked = [work(tokenizer, sample("png")), work(tokenizer, sample("gif"))]
    done = await asyncio.gather(*[answered(engine, one) for one in asked])
    assert [one.usage.input_tokens for one in done] == [one.input_tokens for one in asked]
