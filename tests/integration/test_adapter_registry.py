"""The adapter registry of a running gateway: add, try as a canary, promote, roll back, retire, under load."""

from __future__ import annotations

import json
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from gateway.contracts.evaluation_report import sign
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway

# The tests depend on each other: they run in order and in one process.
pytestmark = pytest.mark.xdist_group("adapter-registry")

SHIPPED = ROOT / "models" / "adapters"
ALIAS = "style"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """A gateway whose registry is empty, with room for two adapters, and a route that falls back to the base."""
    folder = tmp_path_factory.mktemp("registry")
    route = {"backends": [{"name": "local", "weight": 100}], "fallback": []}
    routing = {"routes": {"self_hosted_generation": route, "gentle": {**route, "adapter_fallback": "base"}}}
    (folder / "routing.yaml").write_text(json.dumps(routing))
    with gateway(
        folder,
        SLUICE_ENGINE__MAX_LORAS="2",
        SLUICE_ROUTING__FILE=str(folder / "routing.yaml"),
        SLUICE_ADMISSION__MAX_WAIT_MS="60000",
    ) as running:
        yield running


def post(live: LiveGateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/admin/adapters{path}", json=body, headers=live.headers, timeout=60)


def done(live: LiveGateway, path: str, **body: Any) -> Mapping[str, Any]:
    response = post(live, path, **body)
    assert response.status_code in (200, 201), response.text
    answer: Mapping[str, Any] = response.json()
    return answer


def listed(live: LiveGateway) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = httpx.get(
        f"{live.url}/admin/adapters", headers=live.headers, timeout=60
    ).json()
    return answer


def ask(live: LiveGateway, adapter_id: str | None, **fields: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "Who wrote Berserk?"}],
        "sampling": {"temperature": 0, "max_tokens": 8},
        **({"adapter_id": adapter_id} if adapter_id else {}),
        **fields,
    }
    return httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)


@contextmanager
def load(live: LiveGateway) -> Iterator[list[httpx.Response]]:
    """Run four callers until the block ends; they ask for the alias, in sessions, and for the base model."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def caller(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            name = None if (number + turn) % 3 == 0 else ALIAS
            answers.append(ask(live, name, session_id=f"session-{number}-{turn % 10}"))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def versions_of(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(answer.json().get("backend_version", answer.text) for answer in answers)


def settle(answers: list[httpx.Response], more: int = 8) -> None:
    """Wait for ``more`` further answers."""
    end, wanted = time.monotonic() + 60, len(answers) + more
    while len(answers) < wanted:
        assert time.monotonic() < end, "no answers come"
        time.sleep(0.02)


def test_a_version_is_added_tried_promoted_rolled_back_and_retired_under_load_and_no_request_fails(
    live: LiveGateway,
) -> None:
    added = done(live, "", id="style_v1", location=str(SHIPPED / "jp_style_v1"), labels={"kind": "style"})
    assert (added["state"], added["rank"], added["labels"]) == ("staged", 8, {"kind": "style"})
    assert ask(live, "style_v1").status_code == 200  # an operator may use a staged version
    assert done(live, "/style_v1/preload")["resident"] is True
    refused = post(live, "/style_v1/promote", alias=ALIAS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_evaluated")
    made_up = done(live, "/style_v1/evaluation", report={"passed": True, "signed": True, "id": "report-1"})
    assert made_up["evaluation"]["signed"] is False
    assert post(live, "/style_v1/promote", alias=ALIAS).status_code == 409
    report = {"passed": True, "candidate_sha256": added["sha256"], "prompts": {"sha256": "0" * 64}}
    done(live, "/style_v1/evaluation", report=sign(report, ADMIN_KEY.encode()))
    assert done(live, "/style_v1/promote", alias=ALIAS)["state"] == "active"
    done(live, "", id="style_v2", location=str(SHIPPED / "general_support_v2"))
    with load(live) as answers:
        settle(answers)
        assert post(live, "/style_v2/promote", alias=ALIAS, percent=50).status_code == 409
        done(live, "/style_v2/promote", alias=ALIAS, percent=50, force=True)
        settle(answers, 24)
        done(live, "/style_v2/promote", alias=ALIAS, force=True, comment="looks good")
        settle(answers)
        done(live, "/aliases/style/rollback")
        settle(answers)
        assert done(live, "/style_v2/retire")["state"] == "retired"
        settle(answers)
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.json()["fallback"] is None for answer in answers)
    seen = versions_of(answers)
    assert seen.keys() == {"demo", "demo+style_v1", "demo+style_v2"}
    gone = ask(live, "style_v2")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_adapter")
    assert "is retired" in gone.json()["error"]["message"]
    live.wait_until_idle()
    end = time.monotonic() + 60
    while "style_v2" in listed(live)["resident"]:
        assert time.monotonic() < end, "a retired version is not unloaded"
        time.sleep(0.05)


def test_a_session_stays_on_its_version_while_a_canary_runs(live: LiveGateway) -> None:
    done(live, "", id="style_v3", location=str(SHIPPED / "manga_domain_v3"))
    done(live, "/style_v3/promote", alias=ALIAS, percent=50, force=True)
    first = {n: ask(live, ALIAS, session_id=f"s{n}").json()["backend_version"] for n in range(12)}
    again = {n: ask(live, ALIAS, session_id=f"s{n}").json()["backend_version"] for n in range(12)}
    assert first == again
    assert set(first.values()) == {"demo+style_v1", "demo+style_v3"}
    done(live, "/aliases/style/end-canary")
    assert ask(live, ALIAS, session_id="s1").json()["backend_version"] == "demo+style_v1"
    assert done(live, "/style_v3/verify")["verified"] is True


def test_an_invalid_adapter_is_refused_with_its_reason_and_an_id_keeps_its_content(
    live: LiveGateway, tmp_path: Path
) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_bytes((SHIPPED / "jp_style_v1/adapter_config.json").read_bytes())
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04.")
    refused = post(live, "", id="pickled", location=str(pickled))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "adapter_rejected")
    assert refused.json()["error"]["message"].startswith("not_safetensors: ")
    archive = tmp_path / "packed.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(SHIPPED / "manga_domain_v3", "manga_domain_v3")
    taken = post(live, "", id="style_v1", location=str(archive))
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "adapter_conflict")
    assert "versions never change" in taken.json()["error"]["message"]
    same = done(live, "", id="style_v1", location=str(SHIPPED / "jp_style_v1"))
    assert same["state"] == "active"
    assert post(live, "/nobody/retire").status_code == 404


def test_a_route_may_let_the_base_answer_when_an_adapter_cannot_be_loaded(
    live: LiveGateway, tmp_path: Path
) -> None:
    location = shutil.copytree(SHIPPED / "general_support_v2", tmp_path / "spoilt")
    spoilt = done(live, "", id="spoilt", location=str(location))
    shutil.rmtree(location)  # the damaged copy cannot be replaced
    done(live, "/spoilt/promote", force=True)
    # Equal contents are stored once: the retired style_v2 had the same content.
    kept = live.folder / "state.db.adapters" / spoilt["sha256"]
    weights = kept / "adapter_model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:1000])
    clear = ask(live, "spoilt", route="self_hosted_generation")
    assert clear.status_code == 503
    assert clear.json()["error"]["message"].startswith("model_not_found: adapter spoilt cannot be loaded")
    answer = ask(live, "spoilt", route="gentle").json()
    assert answer["backend_version"] == "demo"
    assert answer["warnings"] == [
        "adapter spoilt could not be used (model_not_found); the base model answered"
    ]
    assert ask(live, "style_v1").json()["backend_version"] == "demo+style_v1"
    assert live.metric("sluice_adapter_replaced_by_base_total") == 1
    broken = post(live, "/spoilt/verify")
    assert broken.json()["error"]["code"] == "adapter_rejected"


def test_an_adapter_that_computes_nan_fails_only_its_own_requests(live: LiveGateway, tmp_path: Path) -> None:
    folder = tmp_path / "huge"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((SHIPPED / "jp_style_v1/adapter_config.json").read_bytes())
    weights = load_file(SHIPPED / "jp_style_v1/adapter_model.safetensors")
    save_file({name: one * 0 + 1e30 for name, one in weights.items()}, folder / "adapter_model.safetensors")
    done(live, "", id="huge", location=str(folder))
    done(live, "/huge/promote", force=True)
    for number in range(8):
        failed = ask(live, "huge", session_id=f"huge-{number}")
        assert (failed.status_code, failed.json()["error"]["param"]) == (503, "adapter_id"), failed.text
        assert failed.json()["error"]["message"].startswith("nan_output: with adapter huge")
    for name, version in ((None, "demo"), ("style_v1", "demo+style_v1")):
        answer = ask(live, name).json()
        assert (answer["backend_version"], answer["fallback"]) == (version, None)
    answer = ask(live, "huge", route="gentle").json()
    assert answer["backend_version"] == "demo"
    assert answer["warnings"] == ["adapter huge could not be used (nan_output); the base model answered"]


def test_each_change_is_audited_and_models_lists_what_is_served(live: LiveGateway) -> None:
    models = httpx.get(f"{live.url}/v1/models", headers=live.headers, timeout=60).json()["data"]
    assert {"style_v1", ALIAS} <= {model["id"] for model in models}
    assert "style_v2" not in {model["id"] for model in models}
    text = live.log.read_text()
    assert "adapter.promote.forced" in text and "adapter.retire" in text
