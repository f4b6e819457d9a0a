"""Prompt tokens counted before admission, compared with what the servers report, for each way to count.

    python -m benchmarks.counted_models                (options: --help)

One gateway has the embedded engine, a pool of two ``vllm serve`` on the CPU with different tokenizers and
lengths, the second of them also as a hosted service, and the stand-in for Bedrock. The gateway cannot read
the second model's folder, so the worker's ``/tokenize`` counts its prompts. The hosted service has no such
endpoint, so an estimate that learns from ``usage`` is used. Every prompt is new and has 1 to 9 turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.bedrock.stand_in import StandIn, stand_in
from benchmarks.vllm_server import KEY, REPOSITORY, Server, free_port
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role

DEMO = REPOSITORY / "models/demo"
LEARNED_AFTER = 50
SECTIONS = ("system", "retrieval", "recent_turns", "older_summary")
TEXT = """
Vinland saga, 何か お勧め は ありますか? naïve café 12,345.67 return volume shipping to Zürich {x: [1]}
"""
WORDS = TEXT.split()
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
BEDROCK_MODEL = "anthropic.claude-3-haiku-20240307-v1:0"


def tiny_model(folder: Path) -> None:
    """Write a model without weights: a tokenizer, and a shape that ``--load-format dummy`` fills."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|eot|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id("<|eot|>"), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))


def demo_tokens(tokenizer: ChatTokenizer) -> Callable[[dict[str, Any]], int]:
    """Return the stand-in's token counter: the gateway's tokenizer for models without one of their own."""

    def count(body: dict[str, Any]) -> int:
        system = [("system", body["system"])] if body.get("system") else []
        said = [*system, *((one["role"], one["content"]) for one in body["messages"])]
        texts = [Message(Role(role), "".join(one.get("text", "") for one in parts)) for role, parts in said]
        return len(tokenizer.encode_chat(texts))

    return count


def vllm(name: str, model: str, length: int, folder: Path, *options: str, cwd: Path = REPOSITORY) -> Server:
    """Start one ``vllm serve``."""
    port = free_port()
    flags = {
        "--model": model, "--host": "127.0.0.1", "--port": str(port),
        "--dtype": "float32", "--max-model-len": str(length), "--max-num-seqs": "16",
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options]
    command += [part for pair in flags.items() for part in pair]
    # The model is also served under the name of the hosted service.
    command += ["--served-model-name", name, f"{name}-hosted"]
    env = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    return Server(name, name, command, env, f"http://127.0.0.1:{port}", folder / f"{name}.log", cwd)


def gateway(folder: Path, large: Server, small: Server, bedrock: StandIn) -> Server:
    """Start ``sluice serve`` in front of all servers."""
    pool: dict[str, Any] = {"kind": "openai", "base_urls": [f"{large.url}/v1", f"{small.url}/v1"]}
    backends = {
        "local": {"kind": "engine"},
        "gpus": pool,
        "hosted": {**pool, "base_urls": [f"{small.url}/v1"], "dialect": "openai", "model": "small-hosted"},
        "bedrock": {
            "kind": "bedrock", "model_id": BEDROCK_MODEL, "region": "us-east-1", "endpoint_url": bedrock.url
        },
    }  # fmt: skip
    settings = {
        "server": {"port": free_port()},
        "engine": {"kind": "embedded", "model": "models/demo", "max_model_len": 4096, "num_threads": 1},
        "backends": backends,
        "state": {"url": f"sqlite:///{folder}/state.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger.db"},
        "routing": {"file": str(folder / "routing.yaml")},
    }
    route = {"backends": [{"name": "local"}], "fallback": [name for name in backends if name != "local"]}
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": {"chat": route}}))
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "ops.cli", "serve", "--config", str(folder / "sluice.yaml")]
    env = {
        "SLUICE_ADMIN_KEY": KEY, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
    }  # fmt: skip
    url = f"http://127.0.0.1:{settings['server']['port']}"  # type: ignore[index]
    return Server("sluice", "", command, env, url, folder / "sluice.log")


@dataclass(frozen=True, slots=True)
class Counted:
    """The tokens of one request: as planned, and as the server reported."""

    planned: int
    used: int

    @property
    def error(self) -> float:
        """Return the error of the planned tokens, as a share of the reported ones."""
        return abs(self.planned - self.used) / self.used


async def counted(client: httpx.AsyncClient, model: str, requests: int) -> list[Counted]:
    """Send ``requests`` new conversations."""
    rng, found = random.Random(model), []
    for _ in range(requests):
        turns = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(rng.randrange(1, 10, 2))]
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
        body = {"model": model, "messages": messages, "max_tokens": 1}
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{model}: {answer.text}")
        shown = answer.json()
        planned = sum(shown["sluice"]["budget"][name] for name in SECTIONS)
        found.append(Counted(planned, shown["usage"]["prompt_tokens"]))
    return found


async def measure(requests: int, folder: Path, stack: ExitStack) -> None:
    """Start all servers, send requests for every model, and print a line for each."""
    tiny_model(folder / "small")
    large = vllm("large", str(DEMO), 2048, folder)
    stack.callback(large.close)
    small = vllm("small", "./small", 512, folder, "--load-format", "dummy", cwd=folder)
    stack.callback(small.close)
    for one in (large, small):
        await one.wait_ready("/health")
    bedrock = stack.enter_context(stand_in(demo_tokens(ChatTokenizer(DEMO))))
    front = gateway(folder, large, small, bedrock)
    stack.callback(front.close)
    await front.wait_ready("/ready")
    names = {"demo": 0, "large": 2048, "small": 512, "small-hosted": 0, BEDROCK_MODEL: 0}
    headers = {"Authorization": f"Bearer {KEY}", "prefer": "sluice-no-fallback"}
    async with httpx.AsyncClient(base_url=front.url, headers=headers, timeout=120) as client:
        while True:
            cards = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
            if cards.keys() >= names.keys():
                break
            await asyncio.sleep(0.5)
        heads = f"{'model':42} length  {'counted by':34}     equal"
        print(f"{heads}  error after {LEARNED_AFTER}: median, most")
        for name, length in names.items():
            rows = await counted(client, name, requests)
            equal = sum(one.planned == one.used for one in rows)
            later = sorted(one.error for one in rows[LEARNED_AFTER:] or rows)
            if length and cards[name]["max_model_len"] != length:
                raise RuntimeError(f"{name} has the length {cards[name]['max_model_len']}")
            card = (await client.get(f"/v1/models/{name}")).json()
            print(
                f"{name:42} {card['max_model_len']:6}  {card['counted_by'][:34]:34} {equal:4}/{requests:4}"
                f"  {later[len(later) // 2]:.1%}, {later[-1]:.1%}"
            )


def main(requests: Annotated[int, typer.Option(min=1, help="For each model.")] = 300) -> None:
    """Measure each model."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asyncio.run(measure(requests, Path(folder), stack))


if __name__ == "__main__":
    typer.run(main)
