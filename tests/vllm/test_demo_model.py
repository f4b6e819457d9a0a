"""The demo model's folder loads in vLLM as it is, and says there what it says here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.values import EngineConfig, GenerationRequest, SamplingParams

ROOT = Path(__file__).parents[2]
QUESTIONS = ["Recommend something like Vinland Saga", "How long does shipping take?", "Who wrote Berserk?"]
MAX_TOKENS = 48

IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, questions, max_tokens = json.loads(sys.argv[1])
    llm = LLM(model=model, dtype="float32", max_model_len=512, enforce_eager=True, disable_log_stats=True)
    prompts = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    found = [[list(out.prompt_token_ids), list(out.outputs[0].token_ids)] for out in outputs]
    print("FOUND" + json.dumps(found), flush=True)

if __name__ == "__main__":
    main()
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build exists for Linux on x86-64 alone"
)


def answers_of_vllm(tmp_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and output ids of each question."""
    script = tmp_path / "in_vllm.py"
    script.write_text(IN_VLLM)
    model = str(ROOT / "models" / "demo")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([model, QUESTIONS, MAX_TOKENS])],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    line = next((line for line in done.stdout.splitlines() if "FOUND" in line), None)
    assert line is not None, done.stderr[-3000:]
    return [(prompt, output) for prompt, output in json.loads(line.split("FOUND", 1)[1])]


async def test_the_demo_model_gives_the_same_tokens_in_vllm_and_in_the_embedded_engine(
    tmp_path: Path,
) -> None:
    model = str(ROOT / "models" / "demo")
    found = await asyncio.to_thread(answers_of_vllm, tmp_path)
    client = EngineClient(EngineConfig(model, dtype="float32", num_threads=1, kv_cache_bytes=64 << 20))
    await client.start()
    try:
        for number, (prompt, expected) in enumerate(found):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
            tokens: list[int] = []
            with client.submit(GenerationRequest(str(number), tuple(prompt), sampling)) as ticket:
                while True:
                    output = await ticket.receive()
                    tokens.extend(output.token_ids)
                    if output.finish_reason is not None:
                        break
            assert tokens == expected, QUESTIONS[number]
    finally:
        await client.stop()
