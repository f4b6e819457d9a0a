"""Reasoning that clients carry sealed from one request to the next."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from accounting.stored_responses import ResponseStore
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.contracts.events import Delta, Reasoning
from gateway.contracts.responses.body import Includable, ResponsesBody
from gateway.contracts.responses.request import ReasoningSeal, ResponsesRequest, responses_request
from gateway.contracts.responses.stream import ResponsesDialect
from gateway.errors import InvalidRequest
from gateway.keys.sealing import AesCipher, AesReasoningSeal
from gateway.requests.stored_responses import StoredResponses
from gateway.testing import FakeJourney, answer_for, fake_services
from gateway.wiring.foundation import make_cipher, make_foundation
from gateway.wiring.services import make_seal
from tests.contracts.responses_language import check
from tests.contracts.test_responses_requests import ORIGIN
from tests.contracts.test_responses_stream import events

OLD, NEW, FOREIGN = b"o" * 32, b"n" * 32, b"f" * 32


def sealed_by(keys: list[bytes]) -> AesReasoningSeal:
    return AesReasoningSeal(AesCipher(keys, "reasoning"))


SEAL = sealed_by([NEW, OLD])
INCLUDE = {"include": ["reasoning.encrypted_content"]}
WORDS = "The shelf is empty, so I must ask."


def asked(seal: ReasoningSeal | None = SEAL, tenant: str = "acme", **body: Any) -> ResponsesRequest:
    caller = replace(ORIGIN.caller, tenant=tenant)
    whole = ResponsesBody.model_validate({"model": "demo", "input": "hi", **body})
    return responses_request(whole, structs.replace(ORIGIN, caller=caller), seal=seal)


def sent_back(sealed: str, seal: ReasoningSeal | None = SEAL, **changes: Any) -> str | None:
    """The reasoning that is read from a history item with sealed content only."""
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}
    turn = [item, {"role": "assistant", "content": "Ask?"}, {"role": "user", "content": "Yes."}]
    return asked(seal, **{"input": turn, **changes}).request.messages[0].reasoning


@given(st.text(), st.text(), st.text())
def test_what_is_sealed_is_opened_for_its_tenant_and_model_alone(text: str, tenant: str, model: str) -> None:
    sealed = SEAL.seal(tenant, model, text)
    assert SEAL.opened(tenant, model, sealed) == text
    assert SEAL.opened(f"{tenant}x", model, sealed) is None
    assert SEAL.opened(tenant, f"{model}x", sealed) is None
    assert SEAL.opened(f"{tenant}{model}", "", sealed) is None or not model


@given(st.integers(0, 70), st.integers(1, 255))
def test_what_was_changed_or_cut_is_not_opened(at: int, by: int) -> None:
    data = bytearray(base64.urlsafe_b64decode(SEAL.seal("acme", "demo", WORDS)))
    at %= len(data)
    data[at] ^= by
    assert SEAL.opened("acme", "demo", base64.urlsafe_b64encode(data).decode()) is None
    data[at] ^= by
    assert SEAL.opened("acme", "demo", base64.urlsafe_b64encode(data[:at]).decode()) is None


@given(st.text())
def test_a_text_that_was_never_sealed_is_not_opened(text: str) -> None:
    assert SEAL.opened("acme", "demo", text) is None


def test_a_key_is_replaced_without_a_break() -> None:
    before, after = sealed_by([OLD]), sealed_by([NEW])
    assert sent_back(before.seal("acme", "demo", WORDS)) == WORDS
    assert after.opened("acme", "demo", SEAL.seal("acme", "demo", WORDS)) == WORDS
    assert before.opened("acme", "demo", SEAL.seal("acme", "demo", WORDS)) is None


def test_reasoning_is_sealed_where_it_is_asked_for_and_read_again_without_its_content() -> None:
    dialect, request = ResponsesDialect(), asked(**INCLUDE)
    answer = answer_for(request.request, "Ask?", reasoning=WORDS)
    frames = dialect.frames(request, "demo")
    opening = frames.opening + frames.event(Reasoning(WORDS, 9)) + frames.delta(Delta("Ask?", 1))
    streamed = events(opening + frames.finish(answer))
    check(streamed)
    [added] = [one["item"] for one in streamed if one["type"] == "response.output_item.added"][:1]
    [done] = [one["item"] for one in streamed if one["type"] == "response.output_item.done"][:1]
    assert "encrypted_content" not in added and done == streamed[-1]["response"]["output"][0]
    [whole, _] = json.loads(dialect.whole(request, answer))["output"]
    for item in (done, whole):
        assert item["content"] == [{"type": "reasoning_text", "text": WORDS}]
        assert WORDS not in item["encrypted_content"]
        assert sent_back(item["encrypted_content"]) == WORDS


@pytest.mark.parametrize(("seal", "body"), [(SEAL, {}), (None, INCLUDE)])
def test_nothing_is_sealed_without_a_key_or_unless_asked(seal: Any, body: dict[str, Any]) -> None:
    request = asked(seal, **body)
    whole = ResponsesDialect().whole(request, answer_for(request.request, "Ask?", reasoning=WORDS))
    assert b"encrypted_content" not in whole and WORDS.encode() in whole


def test_what_cannot_be_opened_is_refused_by_name_unless_its_content_is_there() -> None:
    sealed = SEAL.seal("acme", "demo", WORDS)
    for changes in (
        {"tenant": "umbra"},
        {"model": "other"},
        {"seal": None},
        {"seal": sealed_by([FOREIGN])},
        {"sealed": "gAAAAABforeign"},
    ):
        with pytest.raises(InvalidRequest) as refused:
            sent_back(**{"sealed": sealed, **changes})
        assert refused.value.param == "input.0.encrypted_content"
        assert sealed not in refused.value.message
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABforeign"}
    plain = {**item, "content": [{"type": "reasoning_text", "text": "Hm."}]}
    history = [plain, {"role": "assistant", "content": "Ask?"}, {"role": "user", "content": "Yes."}]
    assert asked(input=history).request.messages[0].reasoning == "Hm."


def test_reasoning_of_an_earlier_turn_that_cannot_be_opened_is_refused_as_of_that_turn() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": SEAL.seal("acme", "demo", WORDS)}
    body = ResponsesBody.model_validate({"model": "other", "input": "hi"})
    with pytest.raises(InvalidRequest) as refused:
        responses_request(body, ORIGIN, seal=SEAL, before=[item])
    assert refused.value.message.startswith("previous_response_id.encrypted_content was not sealed here")


async def test_the_path_seals_with_the_services_key(connect: Any) -> None:
    journey = FakeJourney(pieces=("Ask?",), changes={"reasoning": WORDS})
    async with connect(fake_services(journey, seal=SEAL)) as client:
        body = {"model": "demo", "input": "hi", "store": False, **INCLUDE}
        first = (await client.post("/v1/responses", json=body)).json()
        item, said = first["output"]
        del item["content"]
        again = {**body, "input": [item, said, {"role": "user", "content": "Yes."}]}
        assert (await client.post("/v1/responses", json=again)).status_code == 200
    assert journey.requests[-1].messages[0].reasoning == WORDS


@pytest.mark.parametrize("name", ["include[]", "include"])
async def test_reading_a_stored_response_seals_its_reasoning_where_asked(
    connect: Any, tmp_path: Path, name: str
) -> None:
    store = ResponseStore(f"sqlite+aiosqlite:///{tmp_path}/state.db", tenant_bytes=1 << 20)
    journey = FakeJourney(pieces=("Ask?",), changes={"reasoning": WORDS})
    ask = {"params": [(name, one) for one in (*INCLUDE["include"], "message.output_text.logprobs")]}
    async with connect(fake_services(journey, seal=SEAL, responses=StoredResponses(store))) as client:
        first = (await client.post("/v1/responses", json={"model": "demo", "input": "hi"})).json()
        path = f"/v1/responses/{first['id']}"
        plain, shown = (await client.get(path)).json(), (await client.get(path, **ask)).json()
        body = {"model": "demo", "input": "Yes.", "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
        listed = (await client.get(f"/v1/responses/{second['id']}/input_items", **ask)).json()["data"]
        wrong = [await client.get(f"{path}{at}", params={name: "logprobs"}) for at in ("", "/input_items")]
    await store.close()
    sealed = shown["output"][0].pop("encrypted_content")
    assert plain == shown == first and sent_back(sealed) == WORDS
    [again] = [one for one in listed if one["type"] == "reasoning"]
    assert sent_back(again["encrypted_content"]) == WORDS and len(listed) == 4
    for refused in wrong:
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, f"{name}.0")
        assert all(repr(value) in error["message"] for value in get_args(Includable))


def test_the_keys_are_in_the_environment_or_a_file(monkeypatch: Any, tmp_path: Path) -> None:
    def made(**responses: Any) -> ReasoningSeal | None:
        sections = {
            "engine": {"kind": "none", "model": "models/demo"},
            "backends": {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "m"}},
            "state": {"url": "memory://"},
            "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/ledger.db"},
        }
        return make_seal(make_foundation(Settings.model_validate({**sections, "responses": responses})))

    assert made() is None
    monkeypatch.setenv("SLUICE_SEAL_KEY", "short")
    with pytest.raises(ConfigError, match=r"^SLUICE_SEAL_KEY: .*32 or more") as refused:
        made()
    assert "short" not in str(refused.value)
    monkeypatch.setenv("SLUICE_SEAL_KEY", FOREIGN.decode())
    foreign = made()
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"^responses.seal_key_file: .*cannot be read"):
        made(seal_key_file=str(file))
    file.write_bytes(NEW + b"\n" + OLD + b"\n")
    own = made(seal_key_file=str(file))
    assert foreign is not None and own is not None
    assert SEAL.opened("acme", "demo", own.seal("acme", "demo", WORDS)) == WORDS
    assert SEAL.opened("acme", "demo", foreign.seal("acme", "demo", WORDS)) is None


@pytest.mark.parametrize("make", [make_seal, lambda base: make_cipher(base.settings, "files")])
def test_a_key_without_the_package_that_it_needs_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    sections = {
        "engine": {"kind": "none", "model": "models/demo"},
        "backends": {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "m"}},
        "state": {"url": "memory://"},
        "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/ledger.db"},
    }
    base = make_foundation(Settings.model_validate(sections))
    assert make(base) is None
    monkeypatch.setenv("SLUICE_SEAL_KEY", FOREIGN.decode())
    assert make(base) is not None
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"needs cryptography: pip install 'sluice-gateway\[sealing\]'"):
        make(base)
