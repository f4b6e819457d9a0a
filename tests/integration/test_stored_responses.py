"""Stored responses of a real process that is killed."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.contracts.responses_language import check
from tests.contracts.test_responses_stream import events
from tests.integration.live import ADMIN_KEY, gateway

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
ASKED = {"model": "demo", "input": "What should I read next?", "max_output_tokens": 16, "temperature": 0}


def test_a_background_prompt_that_is_too_long_for_the_model_is_refused_at_once(tmp_path: Path) -> None:
    body = {**ASKED, "input": "word " * 6_000}
    with gateway(tmp_path) as live, httpx.Client(base_url=live.url, headers=KEY, timeout=60) as client:
        whole = client.post("/v1/responses", json=body)
        for stream in (False, True):
            sent = client.post("/v1/responses", json={**body, "background": True, "stream": stream})
            assert (sent.status_code, sent.json()) == (whole.status_code, whole.json())
    assert whole.json()["error"]["code"] == "context_length_exceeded"


def test_what_was_answered_outlives_a_killed_gateway(tmp_path: Path) -> None:
    with gateway(tmp_path) as live, httpx.Client(base_url=live.url, headers=KEY, timeout=60) as client:
        whole = client.post("/v1/responses", json=ASKED).json()
        with client.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as streaming:
            streamed = events(streaming.read())[-1]["response"]
        begun = client.post("/v1/responses", json={**ASKED, "background": True}).json()
        ended = client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"}).content
        live.process.kill()
        live.process.wait()
    with gateway(tmp_path) as live, httpx.Client(base_url=live.url, headers=KEY, timeout=60) as client:
        for kept in (whole, streamed):
            assert client.get(f"/v1/responses/{kept['id']}").json() == kept
        again = client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"}).content
        assert again == ended
        check(events(again))
        follows = client.post("/v1/responses", json={**ASKED, "previous_response_id": whole["id"]}).json()
        assert follows["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
