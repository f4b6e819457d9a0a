"""Faults of Bedrock or the network: each becomes a known failure kind in time and leaves nothing."""

from __future__ import annotations

import asyncio
import datetime
import gc
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from botocore import exceptions as aws
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.bedrock.stand_in import ANSWER, NORMAL, Behaviour, StandIn, stand_in
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.backends.bedrock.call import EventBatches, Wire
from gateway.backends.bedrock.cutting import make_cuttable
from gateway.backends.bedrock.transport import Transport
from gateway.backends.bedrock.transport import failure_of as classified
from gateway.config.backends import BedrockSection
from gateway.contracts.events import Delta
from gateway.limited.aws_session import make_session
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import HAIKU, MakeBackend
from tests.bedrock.support import failure_of, threads_of, until, wait_idle, work
from tests.conformance.harness import collect


def refusal(status: int, code: str, message: str = "no", **more: Any) -> Behaviour:
    return Behaviour(status=status, error=code, message=message, **more)


REFUSALS = [
    (refusal(429, "ThrottlingException"), FailureKind.THROTTLED),
    (refusal(400, "ServiceQuotaExceededException"), FailureKind.THROTTLED),
    (refusal(408, "ModelTimeoutException"), FailureKind.TIMEOUT),
    (refusal(429, "ModelNotReadyException"), FailureKind.BACKEND_UNAVAILABLE),
    (refusal(424, "ModelErrorException"), FailureKind.BACKEND_UNAVAILABLE),
    (refusal(500, "InternalServerException"), FailureKind.BACKEND_UNAVAILABLE),
    (refusal(503, "ServiceUnavailableException"), FailureKind.BACKEND_UNAVAILABLE),
    (refusal(502, "SomethingNew"), FailureKind.BACKEND_UNAVAILABLE),
    (refusal(429, "SomethingNew"), FailureKind.THROTTLED),
    (refusal(404, "ResourceNotFoundException"), FailureKind.MODEL_NOT_FOUND),
    (refusal(403, "AccessDeniedException"), FailureKind.ACCESS_DENIED),
    (refusal(403, "ExpiredTokenException"), FailureKind.ACCESS_DENIED),
    (refusal(400, "ValidationException", "Malformed input"), FailureKind.INVALID_INPUT),
    (
        refusal(400, "ValidationException", "Input is too long for requested model."),
        FailureKind.TOKEN_LIMIT_EXCEEDED,
    ),
    (
        refusal(400, "ValidationException", "Input Tokens Exceeded: Number of input tokens exceeds"),
        FailureKind.TOKEN_LIMIT_EXCEEDED,
    ),
    (refusal(400, "ValidationException", "Operation not allowed"), FailureKind.ACCESS_DENIED),
    (
        refusal(400, "ValidationException", "prompt is too long: 200049 tokens > 200000 maximum"),
        FailureKind.TOKEN_LIMIT_EXCEEDED,
    ),
    (
        refusal(400, "ValidationException", "The provided model identifier is invalid."),
        FailureKind.MODEL_NOT_FOUND,
    ),
]
BREAKS = [
    (Behaviour(fault="cut"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="close"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="garbage"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="crc"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="json"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="exception", error="modelStreamErrorException"), FailureKind.STREAM_BROKEN),
    (Behaviour(fault="exception", error="throttlingException"), FailureKind.THROTTLED),
    (Behaviour(fault="exception", error="internalServerException"), FailureKind.BACKEND_UNAVAILABLE),
    (Behaviour(fault="exception", error="serviceUnavailableException"), FailureKind.BACKEND_UNAVAILABLE),
    (
        Behaviour(fault="exception", error="validationException", message="Input is too long for it"),
        FailureKind.TOKEN_LIMIT_EXCEEDED,
    ),
]
HANGS = [Behaviour(hang_before=True), Behaviour(fault="hang")]


async def test_every_refusal_is_one_of_the_closed_set_and_repeats_nothing_of_its_text(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make()
    for behaviour, kind in REFUSALS:
        bedrock.script(behaviour)
        failure = await failure_of(backend)
        assert failure.kind is kind, behaviour
        assert behaviour.message not in str(failure) or behaviour.message == "no"
        assert isinstance(failure.__cause__, aws.ClientError)
    assert len(bedrock.seen) == len(REFUSALS), "boto3 does not try again by itself"
    assert (await collect(backend, work())).text
    await wait_idle(backend)


async def test_a_refused_request_tells_what_is_wrong_without_the_refusals_text(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(
        refusal(400, "ValidationException", "messages.0.content.1.image: my secret exceeds 5 MB maximum"),
        refusal(400, "ValidationException", "tools.0.custom.input_schema: JSON schema is invalid. my secret"),
    )
    backend = make()
    for subjects in ("image", "tool, schema"):
        message = str(await failure_of(backend))
        assert message.endswith(f"(ValidationException; its text speaks of: {subjects})")


async def test_a_retry_after_is_passed_on(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(refusal(429, "ThrottlingException", retry_after="7"))
    assert (await failure_of(make())).retry_after_s == 7.0


async def test_credentials_of_a_rotated_file_are_read_after_the_old_ones_were_refused(
    bedrock: StandIn, make: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    backend = make()
    bedrock.script(Behaviour(), refusal(403, "ExpiredTokenException"))
    for key in ("OLD", "NEW"):
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n")
        await collect(backend, work())
        if key == "OLD":
            assert (await failure_of(backend)).kind is FailureKind.ACCESS_DENIED
    assert bedrock.keys == ["OLD", "OLD", "NEW"]


async def test_credentials_that_are_expired_when_fetched_are_denied_access_and_fetched_again(
    bedrock: StandIn, make: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fetched, config = tmp_path / "fetched", tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {fetched}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    backend = make()
    for year, key in ((2020, "OLD"), (2999, "NEW")):
        fetched.write_text(
            f'{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "x", "SessionToken": "t",'
            f' "Expiration": "{year}-01-01T00:00:00Z"}}'
        )
        if key == "OLD":
            failure = await failure_of(backend)
            assert (failure.kind, "credentials" in str(failure)) == (FailureKind.ACCESS_DENIED, True)
    await collect(backend, work())
    assert bedrock.keys == ["NEW"]


@pytest.mark.parametrize("profile", ["slow", "role"])
def test_a_credential_process_that_never_ends_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    config.write_text(
        "[profile slow]\ncredential_process = sh -c 'sleep 600; true'\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = slow\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    session = make_session(profile=profile, process_s=0.3)
    with pytest.raises(aws.CredentialRetrievalError, match=r"killed: no answer after 0\.3 s") as caught:
        session.client("bedrock-runtime", region_name="us-east-1")
    assert classified(caught.value, region="r", delivered=False).kind is FailureKind.ACCESS_DENIED


async def test_many_calls_with_refused_credentials_make_one_new_client(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make()
    bedrock.always["us-east-1"] = refusal(403, "ExpiredTokenException")
    clients = set()
    for _ in range(6):
        assert (await failure_of(backend)).kind is FailureKind.ACCESS_DENIED
        clients.add(backend._transport._client("us-east-1"))
    assert len(clients) == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_every_broken_stream_is_one_of_the_closed_set(
    bedrock: StandIn, make: MakeBackend, after: int
) -> None:
    backend = make()
    for behaviour, kind in BREAKS:
        bedrock.script(replace(behaviour, after=after))
        answer: list[Delta] = []

        async def out(delta: Delta, answer: list[Delta] = answer) -> None:
            answer.append(delta)

        with pytest.raises(Exception) as caught:
            await backend.generate(work(), out)
        if after or behaviour.fault != "cut":  # a cut before any text is a failed connection
            assert caught.value.kind is kind, behaviour  # type: ignore[attr-defined]
        assert "".join(delta.text for delta in answer) == "Vinland Saga"[: 12 if after else 0]
    assert (await collect(backend, work())).text
    await wait_idle(backend)


@pytest.mark.parametrize("behaviour", HANGS)
async def test_a_hang_ends_by_the_read_timeout_and_frees_its_thread(
    bedrock: StandIn, make: MakeBackend, behaviour: Behaviour
) -> None:
    backend = make(read_timeout_seconds=1.0)
    await collect(backend, work())
    bedrock.script(behaviour)
    started_at = time.monotonic()
    failure = await failure_of(backend)
    assert failure.kind is FailureKind.TIMEOUT and "read_timeout_seconds" in str(failure)
    assert time.monotonic() - started_at < 20.0
    await wait_idle(backend)


async def test_a_trickle_ends_by_the_total_timeout(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make(total_timeout_seconds=0.5)
    backend._transport.warm()
    bedrock.script(Behaviour(pieces=("drop",) * 200, delay_s=0.05))
    failure = await failure_of(backend)
    assert failure.kind is FailureKind.TIMEOUT and "total_timeout_seconds" in str(failure)
    await wait_idle(backend, bedrock)


async def test_the_total_timeout_ends_a_call_after_the_piece_that_a_slow_reader_takes_not_in_it(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(total_timeout_seconds=0.5)
    backend._transport.warm()
    bedrock.script(Behaviour(pieces=("drop",) * 40, delay_s=0.1))
    begun, taken = 0, 0

    async def out(delta: Delta) -> None:
        nonlocal begun, taken
        begun += 1
        await asyncio.sleep(0.7)
        taken += 1

    with pytest.raises(BackendFailure) as caught:
        await backend.generate(work(), out)
    assert caught.value.kind is FailureKind.TIMEOUT and begun == taken > 0
    await wait_idle(backend, bedrock)


async def test_a_refused_connection_is_an_unavailable_backend_and_missing_credentials_are_denied_access(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = await failure_of(make(endpoint_url="http://127.0.0.1:9"))
    assert (nobody.kind, "no connection" in str(nobody)) == (FailureKind.BACKEND_UNAVAILABLE, True)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    keyless = await failure_of(make())
    assert (keyless.kind, "credentials" in str(keyless)) == (FailureKind.ACCESS_DENIED, True)
    profile = await failure_of(make(profile="nowhere"))
    assert (profile.kind, "credentials" in str(profile)) == (FailureKind.ACCESS_DENIED, True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aws.NoCredentialsError(), FailureKind.ACCESS_DENIED),
        (aws.EndpointConnectionError(endpoint_url="u", error="e"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.ConnectTimeoutError(endpoint_url="u", error="e"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.SSLError(endpoint_url="u", error="e"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.ReadTimeoutError(endpoint_url="u", error="e"), FailureKind.TIMEOUT),
        (aws.ConnectionClosedError(endpoint_url="u", error="e", request="r"), FailureKind.STREAM_BROKEN),
        (aws.ParamValidationError(report="r"), FailureKind.INTERNAL),
        (ConnectionResetError(), FailureKind.STREAM_BROKEN),
        (FileNotFoundError(2, "No such file", "/var/run/token"), FailureKind.ACCESS_DENIED),
        (
            aws.ClientError({"Error": {"Code": "InvalidIdentityToken"}}, "AssumeRoleWithWebIdentity"),
            FailureKind.ACCESS_DENIED,
        ),
        (KeyError("usage"), FailureKind.STREAM_BROKEN),
    ],
)
def test_botocores_own_exceptions_are_classified(error: Exception, kind: FailureKind) -> None:
    assert classified(error, region="us-east-1", delivered=True).kind is kind


@pytest.mark.parametrize("fault", ["no_usage", "cut", "exception"])
async def test_a_whole_answer_without_usage_is_counted_by_estimate_however_its_stream_ends(
    bedrock: StandIn, make: MakeBackend, fault: str
) -> None:
    bedrock.script(Behaviour(fault=fault, after=9, error="internalServerException"))
    answer = await collect(make(), work())
    assert answer.completion.usage.output_tokens == answer.tokens == 9
    assert answer.completion.usage.input_tokens > 4


@pytest.mark.parametrize("tokens", [2, 9, 30])
async def test_bedrocks_own_count_is_billed_never_an_estimate_above_it(
    bedrock: StandIn, make: MakeBackend, tokens: int
) -> None:
    bedrock.script(Behaviour(tokens=tokens))
    answer = await collect(make(), work())
    assert answer.completion.usage.output_tokens == tokens


async def test_a_stream_that_never_closes_does_not_keep_a_finished_answer(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make()
    await collect(backend, work())
    bedrock.script(Behaviour(fault="linger"))
    started_at = time.monotonic()
    assert (await collect(backend, work())).completion.usage.output_tokens == 9
    assert time.monotonic() - started_at < 20.0
    await wait_idle(backend, bedrock)


@pytest.mark.parametrize("behaviour", [*HANGS, Behaviour(pieces=("drop ",) * 1000, delay_s=0.05)])
async def test_cancelling_closes_the_connection_and_frees_the_thread_at_once(
    bedrock: StandIn, make: MakeBackend, behaviour: Behaviour
) -> None:
    backend = make()
    backend._transport.warm()
    bedrock.always["us-east-1"] = behaviour
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(collect(backend, work(max_tokens=1000))) for _ in range(8)]
        await until(lambda: len(bedrock.seen) == 8)
        await asyncio.sleep(0.1)
        started_at = time.monotonic()
        for call in calls:
            call.cancel()
    await wait_idle(backend, bedrock)
    assert time.monotonic() - started_at < 20.0


async def test_a_call_that_is_given_up_after_its_answer_does_not_cut_the_next_call_of_its_connection(
    bedrock: StandIn,
) -> None:
    section = BedrockSection(kind="bedrock", model_id=HAIKU, region="us-east-1", endpoint_url=bedrock.url)
    refused, first_was_cut = threading.Event(), threading.Event()

    def failed(region: str, failure: BackendFailure) -> None:
        refused.set()
        first_was_cut.wait(30)

    transport = Transport(section, clock=time.monotonic, on_failure=failed)
    loop = asyncio.get_running_loop()
    request = {
        "modelId": HAIKU,
        "messages": [{"role": "user", "content": [{"text": "Hi"}]}],
        "inferenceConfig": {},
    }
    bedrock.script(refusal(429, "ThrottlingException"), Behaviour(delay_s=0.02))
    first, second = EventBatches(loop), EventBatches(loop)
    first.thread = loop.run_in_executor(None, transport.ask, request, first)
    await until(refused.is_set)
    second.thread = loop.run_in_executor(None, transport.ask, request, second)
    events, over = await second.take()
    first.cut()
    first_was_cut.set()
    while not over:
        more, over = await second.take()
        events += more
    assert "".join([one.text for one in events if isinstance(one, Delta)]) == "".join(ANSWER)
    assert bedrock.connections == 1
    await first.thread


async def test_a_slow_reader_holds_bedrock_back_and_memory_stays_bounded(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend, most = make(), 0
    bedrock.script(Behaviour(pieces=("piece ",) * 3000))
    batches: list[str] = []

    async def out(delta: Delta) -> None:
        nonlocal most
        batches.append(delta.text)
        most = max(most, delta.text.count("piece"))
        await asyncio.sleep(0.005)

    completion = await backend.generate(work(max_tokens=4000), out)
    assert "".join(batches) == "piece " * 3000
    assert completion.usage.output_tokens == 3000
    assert most <= 256


async def test_the_loop_is_never_held_while_many_streams_hang(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make(max_concurrency=16)
    await collect(backend, work())
    bedrock.always["us-east-1"] = Behaviour(fault="hang")

    async def lags() -> list[float]:
        found = []
        for _ in range(100):
            before = time.monotonic()
            await asyncio.sleep(0.01)
            found.append(time.monotonic() - before - 0.01)
        return sorted(found)

    quiet = await lags()
    async with asyncio.TaskGroup() as group:
        began = time.monotonic()
        calls = [group.create_task(collect(backend, work())) for _ in range(16)]
        await until(lambda: len(bedrock.seen) == 17)
        hanging = await lags()
        took_s = time.monotonic() - began
        for call in calls:
            call.cancel()
    for name, found in (("quiet", quiet), ("16 hang", hanging)):
        print(
            f"{name}: median {found[50] * 1e3:.2f} ms, p95 {found[95] * 1e3:.2f}, max {found[-1] * 1e3:.2f}"
        )
    assert took_s < 30.0, "a single read that blocked would have held it for a minute"
    await wait_idle(backend, bedrock)


async def test_throttled_and_failing_regions_are_replaced_before_the_first_token(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(regions=["us-west-2", "eu-west-1"], region_cooldown_seconds=30)
    bedrock.script(refusal(429, "ThrottlingException"))
    bedrock.script(Behaviour(fault="cut", after=0), region="us-west-2")
    answer = await collect(backend, work())
    assert answer.text and bedrock.regions == ["us-east-1", "us-west-2", "eu-west-1"]
    await collect(backend, work())
    assert bedrock.regions[3:] == ["eu-west-1"], "the others cool down"


async def test_when_all_regions_fail_the_failure_is_that_of_the_preferred_one(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(refusal(429, "ThrottlingException", retry_after="7"))
    bedrock.script(refusal(403, "AccessDeniedException"), region="us-west-2")
    failure = await failure_of(make(regions=["us-west-2"]))
    assert (failure.kind, failure.retry_after_s) == (FailureKind.THROTTLED, 7.0)
    assert bedrock.regions == ["us-east-1", "us-west-2"]


async def test_bad_input_is_told_by_the_first_region_alone(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(refusal(400, "ValidationException"))
    failure = await failure_of(make(regions=["us-west-2"]))
    assert failure.kind is FailureKind.INVALID_INPUT and bedrock.regions == ["us-east-1"]


async def test_no_region_resumes_the_answer_of_another(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(Behaviour(fault="cut"))
    assert (await failure_of(make(regions=["us-west-2"]))).kind is FailureKind.STREAM_BROKEN
    assert bedrock.regions == ["us-east-1"]


def test_an_endpoint_may_hold_the_region(make: MakeBackend) -> None:
    backend = make(endpoint_url="http://{region}.bedrock.test")
    client = backend._transport._client("eu-west-1")
    assert client.meta.endpoint_url == "http://eu-west-1.bedrock.test"


def test_a_connection_of_another_call_that_is_given_back_on_the_thread_leaves_a_call_its_own() -> None:
    """The garbage collector ends a broken stream of an earlier call on whichever thread it runs."""
    wire = Wire()
    (ours, peer), (other, far) = socket.socketpair(), socket.socketpair()
    session = SimpleNamespace(_pool_classes_by_scheme={})
    client = SimpleNamespace(_endpoint=SimpleNamespace(http_session=session))
    make_cuttable(client, lambda: wire)
    pool = session._pool_classes_by_scheme["http"]("127.0.0.1", maxsize=2)
    with ours, peer, other, far:
        wire.hold(ours)
        for sock in (other, None):
            pool._put_conn(SimpleNamespace(sock=sock, close=lambda: None))
        wire.cut()
        peer.settimeout(5)
        assert peer.recv(1) == b"", "the call's own socket is shut down"
    kept, (back, reader) = Wire(), socket.socketpair()
    with back, reader:
        kept.hold(back)
        kept.give_back(back)
        kept.cut()
        assert back.send(b"x") == 1, "a socket that was given back serves another call"


async def faulty_calls(backend: BedrockBackend, bedrock: StandIn, count: int) -> None:
    """Make ``count`` calls with all faults in turn; a call that hangs is cancelled after 0.5 s."""
    behaviours: Sequence[Behaviour] = [one for one, _ in (*REFUSALS, *BREAKS)] + HANGS * 6 + [NORMAL]

    async def one_call() -> None:
        try:
            async with asyncio.timeout(0.5):
                await collect(backend, work())
        except Exception:
            return

    async def caller(share: int) -> None:
        for _ in range(share):
            await one_call()

    bedrock.script(*[behaviours[number % len(behaviours)] for number in range(count)])
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(caller(count // 8))
    await wait_idle(backend)


async def test_a_call_for_which_no_thread_can_be_started_is_refused_and_never_made(
    bedrock: StandIn, make: MakeBackend
) -> None:
    class NoThreadOnce(ThreadPoolExecutor):
        refused = False

        def _adjust_thread_count(self) -> None:
            if not self.refused:
                self.refused = True
                raise RuntimeError("can't start new thread")
            super()._adjust_thread_count()  # type: ignore[misc]

    backend = make()
    backend._threads = NoThreadOnce(1)
    failure = await failure_of(backend)
    assert failure.kind is FailureKind.BACKEND_UNAVAILABLE and "can't start new thread" in str(failure)
    assert (await collect(backend, work())).text
    assert len(bedrock.seen) == 1, "the thread of the next call leaves the refused one out"
    assert backend.load.running == 0


async def test_hundreds_of_faulty_calls_leave_no_thread_no_file_and_no_memory(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(max_concurrency=8)
    process = psutil.Process()
    await faulty_calls(backend, bedrock, int(os.environ.get("BEDROCK_FAULTS", "320")) // 4)
    gc.collect()
    files, memory, threads = process.num_fds(), process.memory_info().rss, threads_of(backend)
    await faulty_calls(backend, bedrock, int(os.environ.get("BEDROCK_FAULTS", "320")))
    bedrock.seen.clear()
    bedrock.scripts.clear()  # calls cancelled before they were sent left their scripts
    gc.collect()
    print(
        f"threads {threads} → {threads_of(backend)}, files {files} → {process.num_fds()}, "
        f"memory {memory / 1e6:.0f} → {process.memory_info().rss / 1e6:.0f} MB"
    )
    assert threads <= 8 and threads_of(backend) <= 8
    # What stays open are the connections of two pools; the stand-in's threads close those that were cut.
    await until(lambda: process.num_fds() <= files + 16)
    assert process.memory_info().rss - memory < 30e6
    assert backend._calls == set() and backend.load.running == 0
    assert len(asyncio.all_tasks()) == 1
    assert (await collect(backend, work())).text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(
            issuer_name=name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(hours=1),
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


@pytest.mark.parametrize("behaviour", HANGS)
async def test_a_call_over_tls_is_cut_as_well(
    make: MakeBackend, certificate: Path, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with stand_in(tls=context) as secure:
        backend = make(endpoint_url=secure.url)
        assert (await collect(backend, work())).text
        secure.script(behaviour)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(collect(backend, work()))
            await until(lambda: len(secure.seen) == 2)
            await asyncio.sleep(0.1)
            call.cancel()
        await wait_idle(backend, secure)
        assert (await collect(backend, work())).text
