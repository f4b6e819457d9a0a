"""Keys in real gateways on one store: made by the command, limited, revoked, and gone everywhere at once."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import httpx

from tests import fork_server
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway

ASKED = {"messages": [{"role": "user", "content": "Hi."}], "sampling": {"max_tokens": 4}}


def sluice(live: LiveGateway, *words: str, code: int = 0) -> str:
    done = fork_server.run(command(live, *words), timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout


def command(live: LiveGateway, *words: str) -> list[str]:
    return [sys.executable, "-m", "ops.cli", "keys", *words, "--url", live.url, "--key", ADMIN_KEY]


def ask(live: LiveGateway, key: str, **more: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{live.url}/v1/generate", json={**ASKED, **more}, headers=headers, timeout=30.0)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_key_lives_from_its_making_to_its_revocation(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    state = {"SLUICE_STATE__URL": f"sqlite:///{tmp_path}/state.db"}
    price = '{"input_usd_per_million": 1, "output_usd_per_million": 1}'
    with (
        gateway(tmp_path, SLUICE_BACKENDS__LOCAL__PRICE=price) as live,
        gateway(tmp_path / "second", ready=False, **state) as other,
    ):
        limits = ("--model-limit", "demo:tpm=100000", "--model-limit", "demo:usd_per_day=2.5")
        made = sluice(live, "create", "acme", "--route", "self_hosted_generation", "-m", "the shop", *limits)
        key = made.strip()
        assert made.startswith("slc_")
        answer = ask(live, key)
        assert answer.status_code == 200
        assert code_of(ask(live, key, route="other")) == (403, "forbidden")
        headers = {"Authorization": f"Bearer {key}"}
        assert code_of(httpx.get(f"{live.url}/admin/keys", headers=headers, timeout=60)) == (403, "forbidden")
        models = httpx.get(f"{live.url}/v1/models", headers=headers, timeout=60)
        assert "demo" in [one["id"] for one in models.json()["data"]]

        [shown] = json.loads(sluice(live, "list", "--json"))["keys"]
        assert (shown["tenant"], shown["comment"], shown["role"]) == ("acme", "the shop", "caller")
        assert shown["last_used_at"] is not None and key not in json.dumps(shown)
        assert shown["model_limits"] == {"demo": {"tokens_per_minute": 100_000, "usd_per_day": 2.5}}
        assert shown["model_used"]["demo"]["tokens_per_minute"] > 0
        assert "acme" in sluice(live, "list")
        sluice(live, "create", "acme", "--model-limit", "tpm=5", code=1)
        sluice(live, "change", shown["id"], "--rpm", "1", "--remove", "routes", "--remove", "model_limits")
        assert code_of(ask(live, key, route="other")) == (404, "unknown_route")
        assert code_of(ask(live, key)) == (429, "rate_limited")
        sluice(live, "change", shown["id"], "--remove", "rpm", "--remove", "rpm", "--tpd", "100000")
        assert ask(live, key).status_code == 200
        [changed] = json.loads(sluice(live, "list", "--json"))["keys"]
        assert (changed["routes"], changed["model_limits"], changed["comment"]) == (None, {}, "the shop")
        assert changed["limits"] == {"tokens_per_day": 100_000}
        sluice(live, "change", shown["id"], "--remove", "tenant", code=1)
        sluice(live, "change", shown["id"], code=1)
        early = fork_server.run(command(live, "create", "beta", "--route", "later"), timeout=60)
        assert early.returncode == 0 and early.stdout.startswith("slc_")
        assert (
            "sluice: warning: routes: there is no 'later' now; known: self_hosted_generation" in early.stderr
        )

        def known_to_other() -> bool:
            return httpx.get(f"{other.url}/v1/models", headers=headers, timeout=60).status_code == 200

        deadline = time.monotonic() + 60
        while not known_to_other():
            assert time.monotonic() < deadline
        sluice(live, "revoke", shown["id"])
        revoked = time.monotonic()
        assert code_of(ask(live, key)) == (401, "invalid_key")
        while known_to_other():
            assert time.monotonic() - revoked < 10.0, (
                "a fraction of a second on a machine that does nothing else"
            )
        sluice(live, "revoke", shown["id"], code=1)
        audit = httpx.get(f"{live.url}/admin/audit?limit=3", headers=live.headers, timeout=60).json()[
            "entries"
        ]
        assert [one["action"] for one in audit] == ["key.revoke", "key.revoke", "key.create"]
    assert key not in live.log.read_text() + other.log.read_text()
