"""No log line has a secret of a caller or an operator, whatever breaks."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import yaml

from budgeting.values import Message, Role
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.config.tracing import TracingConfig
from gateway.contracts.answer import Answer
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import PublicError
from gateway.journey import Journey
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from gateway.wiring.tracing import make_tracing, redaction
from observability.logs import configure_logging

SECRETS = (
    "PROMPT-4f1c",
    "sk-planted-5d2e-0123456789abcdef0",
    "AKIAPLANTED0SECRET01",
    "wJalrPLANTEDkey",
    "hunter2-planted",
)
LEAKY = (
    f"{SECRETS[0]} he said, api_key={SECRETS[1]} {SECRETS[2]} aws_secret_access_key={SECRETS[3]} "
    f"postgresql://me:{SECRETS[4]}@db/x"
)
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    stream = io.StringIO()
    logs = configure_logging("debug", json=True, stream=stream)
    closed: list[bool] = []

    def read() -> list[dict[str, Any]]:
        closed.append(logs.close())
        output = stream.getvalue()
        assert not [secret for secret in SECRETS if secret in output]
        return [json.loads(line) for line in output.splitlines()]

    yield read
    if not closed:
        logs.close()


@pytest.fixture
def built(tmp_path: Path) -> Gateway:
    worker = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "base"}
    route = {"backends": [{"name": "pool", "weight": 100}]}
    (tmp_path / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    config = {
        "engine": {"kind": "none"},
        "backends": {"pool": worker},
        "routing": {"file": str(tmp_path / "routing.yaml")},
        "state": {"url": f"sqlite:///{tmp_path}/s.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/l.db"},
        "tracing": {"headers": {"authorization": f"Bearer {SECRETS[1]}"}},
    }
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(config))
    return build(load_settings(tmp_path / "sluice.yaml", {}), admin_key=SECRETS[1])


class ErrorSink:
    """A sink that stores the error."""

    discarded = False

    def __init__(self) -> None:
        self.error: PublicError | None = None

    def planned(self, plan: object, model: str) -> None:
        """Ignores the plan."""

    async def delta(self, delta: object) -> None:
        """Ignores the delta."""

    async def finish(self, answer: Answer) -> None:
        raise AssertionError("nothing can answer here")

    async def fail(self, error: PublicError) -> None:
        self.error = error


class Crashing:
    """A stage that raises an error whose message quotes the prompt."""

    async def canonical_async(self, request: GenerateRequest, version: object, offload: object) -> object:
        raise ValueError(f"cannot read {request.messages[0].content}") from KeyError(LEAKY)


def request_of(built: Gateway) -> GenerateRequest:
    return GenerateRequest(
        request_id="req_1",
        generation_id="gen_1",
        contract=Contract.NATIVE,
        caller=Caller(tenant="shop", key_id="key_1", role=CallerRole.CALLER),
        arrived_at=built.services.clock(),
        created=1_700_000_000,
        messages=(Message(Role.USER, LEAKY),),
    )


async def test_a_stage_that_crashes_is_told_by_type_and_place_alone(built: Gateway, lines: Lines) -> None:
    journey = built.services.journey
    assert isinstance(journey, Journey)
    sink = ErrorSink()
    async with built.running():
        crashing = replace(journey, canonicalizer=Crashing())  # type: ignore[arg-type]
        await crashing.run(request_of(built), sink)
    assert sink.error is not None and sink.error.code == "internal"
    assert LEAKY not in sink.error.message
    logged = lines()
    (defect,) = [line for line in logged if "unexpected ValueError" in line["event"]]
    assert "canonical_async" in defect["event"]
    (request,) = [line for line in logged if line["event"] == "request"]
    assert (request["status"], request["error_code"], request["level"]) == (500, "internal", "error")
    assert request["trace_id"]


async def test_a_backend_that_is_away_is_told_without_the_prompt(built: Gateway, lines: Lines) -> None:
    sink = ErrorSink()
    asked = request_of(built)
    request = msgspec.structs.replace(asked, allow_fallback=False, deadline=asked.arrived_at + 0.3)
    async with built.running():
        await built.services.journey.run(request, sink)
    assert sink.error is not None
    (line,) = [line for line in lines() if line["event"] == "request"]
    assert line["status"] == sink.error.status == 503


@pytest.mark.parametrize(
    ("contract", "path", "event"),
    [("native", "/v1/generate", "request"), (None, "/admin/keys", "http request")],
)
def test_a_request_that_the_http_layer_refuses_is_one_line(
    built: Gateway, lines: Lines, contract: str | None, path: str, event: str
) -> None:
    built.services.emit_edge(
        EdgeRequest(
            request_id=f"mine {SECRETS[1]}", trace_id="ab" * 16, trace_parent=None, trace_state=None,
            arrived_at=built.services.clock(), method="POST", path=path, contract=contract,
            status=401, error=PublicError(401, "invalid_key", f"not {SECRETS[1]}", "key"),
        )
    )  # fmt: skip
    (line,) = [line for line in lines() if line["event"] in ("request", "http request")]
    assert (line["event"], line["status"], line["error_code"]) == (event, 401, "invalid_key")
    assert line["trace_id"] == "ab" * 16
    assert line["error_param"] == "key" and line["error_message"].startswith("not ")


@pytest.mark.parametrize(("contract", "path"), [("native", "/v1/generate"), (None, "/admin/keys")])
def test_the_line_of_a_refused_request_names_the_key_that_sent_it(
    built: Gateway, lines: Lines, contract: str | None, path: str
) -> None:
    built.services.emit_edge(
        EdgeRequest(
            request_id="r", trace_id="ab" * 16, arrived_at=built.services.clock(), method="POST", path=path,
            contract=contract, status=403, error=PublicError(403, "forbidden", "the key's role is 'caller'"),
            caller=Caller(tenant="shop", key_id="key_1", role=CallerRole.CALLER),
        )
    )  # fmt: skip
    (line,) = [line for line in lines() if line["event"] in ("request", "http request")]
    assert (line["status"], line["tenant"], line["key_id"]) == (403, "shop", "key_1")


def test_the_repr_of_the_configuration_has_no_secret() -> None:
    config = TracingConfig(otlp_endpoint="http://c:4318", headers={"authorization": SECRETS[1]})
    assert SECRETS[1] not in repr(config)


def test_words_of_errors_that_libraries_log_are_left_out(lines: Lines) -> None:
    try:
        raise RuntimeError(LEAKY)
    except RuntimeError:
        structlog.get_logger("some.library").error("it broke", exc_info=True)
    (line,) = lines()
    assert line["exception"].endswith("RuntimeError")


def test_recorded_text_loses_credentials_and_what_the_operator_names() -> None:
    taken_out = redaction([r"\b\d{16}\b"])(f"{LEAKY} card 4111111111111111")
    assert not [secret for secret in (*SECRETS[1:], "4111111111111111") if secret in taken_out]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"otlp_endpoint": "collector:4318"}, r"tracing\.otlp_endpoint: not an http\(s\) URL"),
        ({"otlp_endpoint": "https://c", "ca_file": "/nowhere.pem"}, r"tracing\.ca_file: /nowhere\.pem"),
    ],
)
def test_a_collector_that_cannot_be_used_stops_the_start_and_names_the_key(
    wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_tracing(TracingConfig(**wrong), "1")


def test_a_pattern_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        TracingConfig(redact=["("])
