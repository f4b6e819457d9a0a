"""Tenants of a Sluice in front of other Sluices: one learns nothing of another's prompts from a worker's cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.backends.workers.dialect import salt_of
from tests.integration.live import LiveGateway, gateway

SECRET = " ".join(f"The password of vault {number} is {number * 7919}." for number in range(12))
WRONG = " ".join(f"The code word at gate {number} is {number * 6007}." for number in range(12))


class Made(NamedTuple):
    key: str
    key_id: str


FRONTS: dict[str, Made] = {}
"""The fronts' keys at the worker, by role."""


def make_key(live: LiveGateway, tenant: str, **fields: Any) -> Made:
    made = httpx.post(
        f"{live.url}/admin/keys", json={"tenant": tenant, **fields}, headers=live.headers, timeout=60
    )
    assert made.status_code == 201, made.text
    return Made(made.json()["key"], made.json()["id"])


def ask(live: LiveGateway, key: str, text: str, **headers: str) -> dict[str, Any]:
    answer = httpx.post(
        f"{live.url}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 2},
        headers={"authorization": f"Bearer {key}"} | headers,
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(live: LiveGateway, key: str, text: str, **headers: str) -> int:
    return int(ask(live, key, text, **headers)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with gateway(tmp_path_factory.mktemp("worker"), SLUICE_ENGINE__SERVED_MODEL_NAME="demo") as live:
        yield live


@pytest.fixture(scope="module")
def fronts(worker: LiveGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LiveGateway]]:
    """Fronts, by the role of their key at the worker; ``supervised`` starts a worker itself."""
    with ExitStack() as stack:
        found = {}
        for role in ("front", "caller"):
            folder = tmp_path_factory.mktemp(role)
            (folder / "routing.yaml").write_text(
                "routes: {main: {backends: [{name: pool, weight: 100}], fallback: []}}\n"
            )
            (folder / "sluice.yaml").write_text(
                "engine: {kind: none, tokenizer: models/demo, served_model_name: demo}\n"
                f"backends: {{pool: {{kind: openai, base_urls: ['{worker.url}/v1'], model: demo,"
                " api_key_env: FRONTS_KEY}}\n"
                f"routing: {{file: {folder}/routing.yaml}}\n"
            )
            FRONTS[role] = make_key(worker, f"{role}-gateway", role=role)
            found[role] = stack.enter_context(
                gateway(folder, config=folder / "sluice.yaml", FRONTS_KEY=FRONTS[role].key)
            )
        folder = tmp_path_factory.mktemp("supervised")
        found["supervised"] = stack.enter_context(
            gateway(folder, words=("--workers", "1"), SLUICE_ENGINE__SERVED_MODEL_NAME="demo")
        )
        yield found


@pytest.mark.parametrize("which", ["front", "caller", "supervised"])
def test_a_right_guess_of_another_tenants_prompt_finds_as_little_as_a_wrong_one(
    fronts: dict[str, LiveGateway], which: str
) -> None:
    front = fronts[which]
    victim, attacker = (make_key(front, tenant).key for tenant in ("acme", "umbra"))
    cached(front, victim, SECRET)
    cached(front, attacker, "Hello")
    wrong, right = cached(front, attacker, WRONG), cached(front, attacker, SECRET)
    assert right == wrong
    assert cached(front, victim, SECRET) > wrong, "a tenant finds its own"


def rows(live: LiveGateway, key_id: str, count: int) -> list[dict[str, Any]]:
    """The ledger's rows of a key; waits up to 60 s for ``count`` of them."""
    deadline = time.monotonic() + 60
    while True:
        found = httpx.get(f"{live.url}/admin/usage/rows", headers=live.headers, timeout=60).json()["rows"]
        own = [row for row in found if row["key_id"] == key_id]
        if len(own) >= count or time.monotonic() > deadline:
            return own
        time.sleep(0.1)


def test_a_fronts_request_is_the_tenants_at_the_worker_and_billed_by_the_front_alone(
    worker: LiveGateway, fronts: dict[str, LiveGateway]
) -> None:
    front = fronts["front"]
    made = make_key(front, "payer", org="group", max_priority=1)
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "user": "u1",
        "priority": 1, "sluice": {"session_id": "s1", "deadline_ms": 60_000},
    }  # fmt: skip
    answer = httpx.post(
        f"{front.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {made.key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    [billed] = rows(front, made.key_id, 1)
    booked = [row for row in rows(worker, FRONTS["front"].key_id, 1) if row["tenant"] == "payer"]
    assert [(row["kind"], row["org"], row["user_id"], row["session_id"]) for row in booked] == [
        ("front", "group", "u1", "s1")
    ]
    assert billed["kind"] == "request" and billed["billable_output_tokens"] == billed["output_tokens"] > 0
    assert booked[0]["output_tokens"] == billed["output_tokens"]
    assert booked[0]["billable_input_tokens"] == booked[0]["billable_output_tokens"] == 0
    sums = httpx.get(f"{worker.url}/admin/usage?by=tenant", headers=worker.headers, timeout=60).json()["rows"]
    assert "payer" not in {row["tenant"] for row in sums}


def test_forged_headers_of_an_ordinary_key_have_no_effect(
    worker: LiveGateway, fronts: dict[str, LiveGateway]
) -> None:
    victim = make_key(fronts["front"], "acme")
    secret = f"{SECRET} And one more."
    ask(fronts["front"], victim.key, secret)
    assert cached(fronts["front"], victim.key, secret) > 0
    attacker = make_key(worker, "umbra")
    forged = {
        "x-sluice-tenant": "acme",
        "x-sluice-org": "acme",
        "x-sluice-cache-salt": salt_of("acme"),
    }
    assert cached(worker, attacker.key, secret, **forged) == 0
    [row] = rows(worker, attacker.key_id, 1)
    assert (row["tenant"], row["org"], row["kind"]) == ("umbra", None, "request")


def test_a_fronts_key_opens_no_operators_path(worker: LiveGateway) -> None:
    made = make_key(worker, "gateways", role="front")
    for path in ("admin/keys", "admin/routing", "admin/usage", "health/deep"):
        headers = {"authorization": f"Bearer {made.key}", "x-sluice-tenant": "acme"}
        answer = httpx.get(f"{worker.url}/{path}", headers=headers, timeout=60)
        assert answer.status_code == 403, (path, answer.text)
