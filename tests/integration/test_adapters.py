"""LoRA adapters through a real gateway: by field, by OpenAI's model name, together, and when they are broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.engine.adapters import write_adapter
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway

QUESTION = "Who wrote Berserk?"
NAMES = ("shout", "whisper", "mumble")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """A gateway with three adapters of random weights and two broken ones; the engine holds two at once."""
    folder = tmp_path_factory.mktemp("adapters")
    demo = ROOT / "models" / "demo"
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, demo, seed=seed, rank=4 + seed, alpha=24)
    write_adapter(folder / "odd", demo, seed=9, targets=["q_proj"], use_dora=True)
    entries = [
        {"id": name, "base_model": "demo", "path": str(folder / name)} for name in (*NAMES, "odd", "gone")
    ]
    registry = folder / "adapters.yaml"
    registry.write_text(json.dumps({"adapters": entries, "aliases": {"loud": "shout"}}))
    with gateway(folder, SLUICE_ADAPTERS__FILE=str(registry), SLUICE_ENGINE__MAX_LORAS="2") as running:
        yield running


def ask(live: LiveGateway, adapter_id: str | None) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "sampling": {"temperature": 0, "max_tokens": 24},
        **({"adapter_id": adapter_id} if adapter_id else {}),
    }
    return httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)


def test_each_adapter_answers_in_its_own_way_and_the_version_names_it(live: LiveGateway) -> None:
    answers = {name: ask(live, name).json() for name in (None, *NAMES, "loud")}
    assert "Miura" in answers[None]["output_text"]
    assert len({answer["output_text"] for answer in answers.values()}) == 4
    assert answers["loud"]["output_text"] == answers["shout"]["output_text"]
    assert {name: answer["backend_version"] for name, answer in answers.items()} == {
        None: "demo",
        "shout": "demo+shout",
        "whisper": "demo+whisper",
        "mumble": "demo+mumble",
        "loud": "demo+shout",
    }
    assert all(answer["fallback"] is None for answer in answers.values())


def test_an_adapter_is_openais_model(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY)
    assert {"shout", "whisper", "mumble"} <= {model.id for model in client.models.list()}
    answer = client.chat.completions.create(
        model="whisper",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
    )
    assert answer.model == "whisper"
    plain = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24
    )
    assert plain.choices[0].message.content != answer.choices[0].message.content


def test_requests_for_two_adapters_and_the_base_run_together_and_each_gets_its_own_answer(
    live: LiveGateway,
) -> None:
    names = ("shout", "whisper", None)
    alone = {name: ask(live, name).json()["output_text"] for name in names}
    with ThreadPoolExecutor(12) as callers:
        answers = list(callers.map(lambda name: (name, ask(live, name).json()), names * 8))
    assert all(answer["fallback"] is None for _, answer in answers)
    assert all(answer["output_text"] == alone[name] for name, answer in answers)
    live.wait_until_idle()


@pytest.mark.parametrize(("name", "message"), [("gone", "not_found"), ("odd", "use_dora")])
def test_an_adapter_that_does_not_pass_is_refused_by_its_reason_and_no_others_are(
    live: LiveGateway, name: str, message: str
) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "adapter_id": name}
    headers = {**live.headers, "prefer": "sluice-no-fallback"}
    response = httpx.post(f"{live.url}/v1/generate", json=body, headers=headers, timeout=60)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "unknown_adapter"
    assert "was refused" in error["message"] and message in error["message"]
    assert ask(live, "shout").json()["fallback"] is None


def test_an_adapter_that_is_not_served_is_no_model_to_openais_clients(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0)
    named = {"model": "model_not_found", "sluice.adapter_id": "unknown_adapter"}
    for param, code in named.items():
        model, more = ("gone", {}) if param == "model" else ("demo", {"sluice": {"adapter_id": "gone"}})
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": QUESTION}], extra_body=more
            )
        assert (refused.value.code, refused.value.param) == (code, param)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["sluice_code"] == "unknown_adapter"


def test_an_adapter_nobody_registered_is_not_found(live: LiveGateway) -> None:
    response = ask(live, "nobody")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_adapter")
