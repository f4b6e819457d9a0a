"""The ``models`` section: faults name their place, and the wired gateway counts with each model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from budgeting.counting import ChatTokenizer
from gateway.app import create_app
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.contracts.features import TOOL_FEATURES, Capability, Feature
from gateway.wiring.build import build
from gateway.wiring.core import make_core
from tests.budgeting.folders import HEADERS, byte_level, write_folder

ROOT = Path(__file__).parents[1]
KEY = "a-key-for-tests-0123456789abcdef0123456789abcdef"
BACKENDS = {
    name: {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": model, "metrics_path": None}
    for name, model in {"chat": "big/chat", "more": "big/chat", "spare": "small"}.items()
}
PRICE = {"input_usd_per_million": 1, "output_usd_per_million": 2}


def settings(tmp_path: Path, models: object, **changes: Any) -> Settings:
    content = {
        "engine": {"kind": "none", "model": str(ROOT / "models/demo")},
        "backends": BACKENDS,
        "models": models,
        "routing": {"file": str(tmp_path / "routing.yaml")},
        "state": {"url": f"sqlite:///{tmp_path}/state.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/ledger.db"},
        **changes,
    }
    route = {"backends": [{"name": "chat"}], "fallback": ["more", "spare"]}
    (tmp_path / "routing.yaml").write_text(yaml.safe_dump({"routes": {"chat": route}}))
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(content))
    return load_settings(tmp_path / "sluice.yaml", {})


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"big": {}}, ["models.big: no backend has this model", "allowed: big/chat, small"]),
        ({"small": {"aliases": ["chat"]}}, ["models.small.aliases: 'chat' is also backends.chat"]),
        (
            {"small": {"aliases": ["big/chat"]}},
            ["models.small.aliases: 'big/chat' is also the model of backends"],
        ),
        (
            {"small": {"aliases": ["x"]}, "big/chat": {"aliases": ["x"]}},
            ["models.small.aliases: 'x' is also an alias of models.big/chat"],
        ),
        ({"small": {"backends": ["chat"]}}, ["models.small.backends: 'chat' serves 'big/chat'"]),
        ({"small": {"backends": ["gone"]}}, ["there is no 'gone'; allowed: chat, more, spare"]),
        ({"small": {"tokeniser": "x"}}, ["models.small.tokeniser", "did you mean 'tokenizer'"]),
        ({"small": {"max_model_len": 1}}, ["models.small.max_model_len", "64"]),
        ({"small": {"aliases": ["a b"]}}, ["models.small.aliases"]),
        ({"small": {"budgets": {"evidence": 5}}}, ["models.small.budgets.evidence", "unknown"]),
        ({"small": {"budgets": {"retrieval": -1}}}, ["models.small.budgets.retrieval", "0"]),
        ({"small": {"capabilities": ["vision"]}}, ["models.small.capabilities", "'structured_output'"]),
    ],
)
def test_a_fault_of_the_models_names_its_place_and_what_is_allowed(
    tmp_path: Path, models: object, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, models)
    for part in said:
        assert part in str(caught.value)


def test_the_engines_own_model_is_described_by_the_engines_section(tmp_path: Path) -> None:
    local = {"backends": {"local": {"kind": "engine"}}, "engine": {}}
    assert settings(tmp_path, {"demo": {"aliases": ["x"]}}, **local).model_aliases == {"x": "demo"}
    with pytest.raises(ConfigError, match=r"models\.demo\.max_model_len.* set engine\.max_model_len"):
        settings(tmp_path, {"demo": {"max_model_len": 512}}, **local)


def test_a_models_price_is_that_of_its_backends_without_their_own(tmp_path: Path) -> None:
    own = {**BACKENDS["more"], "price": {**PRICE, "input_usd_per_million": 7}}
    found = settings(tmp_path, {"big/chat": {"price": PRICE}}, backends={**BACKENDS, "more": own})
    prices = [found.price(name) for name in ("chat", "more", "spare")]
    assert [one and one.input_usd_per_million for one in prices] == [1, 7, None]


@pytest.mark.parametrize("kind", ["openai", "engine", "bedrock"])
def test_a_backend_of_any_kind_lacks_what_its_model_cannot_do(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("boto3")
    backends: Mapping[str, Mapping[str, object]] = {
        "openai": {**BACKENDS["chat"], "model": "small"},
        "engine": {"kind": "engine", "unknown_fields": "drop"},
        "bedrock": {"kind": "bedrock", "model_id": "small", "region": "us-east-1"},
    }
    engine = {"kind": "embedded", "model": str(ROOT / "models/demo"), "served_model_name": "small"}
    changes = {
        "engine": engine if kind == "engine" else {"kind": "none"},
        "backends": {**BACKENDS, "chat": backends[kind]},
    }

    def features(model: Mapping[str, object]) -> frozenset[Feature]:
        found = settings(tmp_path, {"small": model}, **changes)
        core = make_core(found, KEY, None)
        return core.backends.fleet.backends["chat"].features

    everything = features({})
    assert features({"capabilities": [str(one) for one in Capability]}) == everything
    cannot = {*TOOL_FEATURES, Feature.REASONING_EFFORT, Feature.RESPONSE_FORMAT}
    assert features({"capabilities": []}) == everything - cannot
    if kind == "engine":
        with pytest.raises(ConfigError, match="the embedded engine takes no images"):
            features({"images": {}})
    else:
        assert features({"images": {}}) == everything | {Feature.IMAGES}
        assert features({"images": {}, "capabilities": []}) == everything - cannot | {Feature.IMAGES}
    assert features({"capabilities": ["structured_output"]}) == everything - cannot | (
        everything & {Feature.RESPONSE_FORMAT}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|begin|>", "<|start|>", "<|end|>", "<|eot|>"]
    named = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    return write_folder(tmp_path_factory.mktemp("small"), byte_level(special), HEADERS, **named)


async def test_the_gateway_counts_each_model_with_its_own_tokenizer(tmp_path: Path, folder: Path) -> None:
    models = {
        "small": {"tokenizer": str(folder), "max_model_len": 512, "aliases": ["mini"]},
        "big/chat": {"aliases": ["gpt-4o-mini"]},
    }
    gateway = build(settings(tmp_path, models), admin_key=KEY)
    tokenizers: Mapping[str, ChatTokenizer] = {
        name: ChatTokenizer(path)
        for name, path in {"small": folder, "big/chat": ROOT / "models/demo"}.items()
    }
    lengths = {"small": 512, "big/chat": 4096}
    names = {
        "small": "small",
        "mini": "small",
        "spare": "small",
        "gpt-4o-mini": "big/chat",
        "chat": "big/chat",
    }
    text = "What should I read after Berserk?"
    transport = httpx.ASGITransport(app=create_app(gateway.services))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        gateway.running(),
        httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client,
    ):
        listed = {one["id"]: one["max_model_len"] for one in (await client.get("/v1/models")).json()["data"]}
        assert listed == {
            **{name: lengths[model] for name, model in names.items()},
            "big/chat": 4096,
            "more": 4096,
        }
        for name, model in names.items():
            own = tokenizers[model]
            asked = {"model": name, "messages": [{"role": "user", "content": text}]}
            found = (await client.post("/tokenize", json=asked)).json()
            assert found["max_model_len"] == lengths[model]
            assert own.decode(found["tokens"]).count(text) == 1
            again = await client.post("/detokenize", json={"model": name, "tokens": found["tokens"]})
            assert again.json()["prompt"] == own.decode(found["tokens"])
        unknown = await client.post(
            "/v1/chat/completions",
            json={"model": "gpt-4o-mimi", "messages": [{"role": "user", "content": "x"}]},
        )
        assert unknown.status_code == 404
        assert "did you mean gpt-4o-mini?" in unknown.json()["error"]["message"]
