"""Bedrock's stand-in as a backend under test; it counts prompt tokens as the demo model does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bedrock.stand_in import Behaviour, stand_in
from budgeting.values import Message, Role
from engine.build import build_engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams, SequenceEnd
from gateway.config.backends import BedrockSection
from gateway.wiring.bedrock import make_bedrock
from tests.bedrock.conftest import CREDENTIALS, HAIKU
from tests.conformance.harness import DEMO_MODEL, MAX_MODEL_LEN, Specimen, demo_tokenizer
from tests.engine.support import run_to_end


class DemoModel:
    """The demo model as Bedrock would serve it: messages in, text pieces out, counted by its own tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = demo_tokenizer()
        self._one_at_a_time = threading.Lock()
        self._engine = build_engine(
            EngineConfig(str(DEMO_MODEL), max_model_len=MAX_MODEL_LEN, num_threads=1, num_blocks=128, seed=0)
        )

    def ids(self, request: dict[str, Any]) -> tuple[int, ...]:
        """Return the token ids of the request's prompt."""
        turns = [Message(Role.SYSTEM, block["text"]) for block in request.get("system", [])]
        turns += [Message(Role(one["role"]), _text(one["content"])) for one in request["messages"]]
        partial = turns.pop().content if turns[-1].role is Role.ASSISTANT else ""
        prompt = self.tokenizer.encode_chat(turns)
        return prompt + self.tokenizer.encode(partial, add_special_tokens=False) if partial else prompt

    def answer(self, request: dict[str, Any]) -> Behaviour:
        """Return the answer that the stand-in gives to the request."""
        ids, config = self.ids(request), request["inferenceConfig"]
        if len(ids) >= MAX_MODEL_LEN:
            return Behaviour(
                status=400, error="ValidationException", message="Input is too long for requested model."
            )
        sampling = SamplingParams(
            max_tokens=config["maxTokens"],
            temperature=config.get("temperature", 1.0),
            top_p=config.get("topP", 1.0),
            stop=tuple(config.get("stopSequences", ())),
        )
        with self._one_at_a_time:
            answer = run_to_end(self._engine, [GenerationRequest("one", ids, sampling)])["one"]
        ended = "max_tokens" if answer.finish_reason is SequenceEnd.LENGTH else "end_turn"
        return Behaviour(
            pieces=tuple(filter(None, answer.deltas)),
            tokens=len(answer.token_ids),
            stop_reason=ended,
            delay_s=0.005,
        )


def _text(content: list[dict[str, Any]]) -> str:
    return "".join([block.get("text", "") for block in content])


@asynccontextmanager
async def bedrock(folder: Path) -> AsyncIterator[Specimen]:
    """Run the Bedrock backend with the real boto3 against the stand-in."""
    model = await asyncio.to_thread(DemoModel)
    with (
        pytest.MonkeyPatch.context() as environment,
        stand_in(lambda request: len(model.ids(request))) as server,
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        server.model = model.answer
        section = BedrockSection(kind="bedrock", model_id=HAIKU, region="us-east-1", endpoint_url=server.url)
        backend = make_bedrock("bedrock", section, clock=time.monotonic)

        async def idle() -> bool:
            load = backend.load
            return not (load.running or load.waiting or server.active)

        def script(*behaviours: Behaviour) -> None:
            server.scripts.clear()  # left by requests that were refused before they were sent
            server.script(*behaviours)

        try:
            yield Specimen(
                backend,
                idle,
                tokenizer=model.tokenizer,
                counts_cached=False,
                exact_ids=False,
                reports_blocks=False,
                returns_ids=False,
                exact_prompt=False,
                script=script,
            )
        finally:
            backend.stop()
