"""The request router for Serve, called as Serve calls it: which replicas it names, and in what order."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.ray_router import Call, Router
from ops.cli.ray import RayError, _connected, _messages, _ray_errors, _start_proxies, brief, shown
from ops.ray.wire import RouterHint, encode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CHAIN = tuple(range(100, 120))


def call(*avoid: str) -> Any:
    return Call([encode(RouterHint(CHAIN, 8, None, avoid))])


async def asked(router: Router, pending: Any) -> list[list[str]]:
    ranks = await router.choose_replicas(list(router._replicas.values()), pending)
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


async def test_a_few_replicas_are_all_named_and_those_to_avoid_come_last() -> None:
    best, others, rest = await asked(Router(8), call("r3"))
    assert len(best) == 1
    assert sorted(best + others) == sorted({f"r{number}" for number in range(8)} - {"r3"})
    assert rest == ["r3"]


async def test_of_many_a_shortlist_is_named_and_all_when_serve_found_no_room_there() -> None:
    router, pending = Router(200), call("r3")
    first = [name for rank in await asked(router, pending) for name in rank]
    assert len(first) < 20
    assert "r3" not in first
    best, others, rest = await asked(router, pending)
    assert len(best + others) == 199
    assert rest == ["r3"]


async def test_the_same_prefix_goes_to_the_same_replica_until_that_one_dies() -> None:
    router, pending = Router(200), call()
    best = (await router.choose_replicas(list(router._replicas.values()), pending))[0][0]
    router.on_request_routed(pending, best.replica_id, None)
    assert (await asked(router, call()))[0] == [best.replica_id.unique_id]
    # Serve removes a replica at once when its process has ended.
    router._replicas.pop(best.replica_id)
    assert best.replica_id.unique_id not in {name for rank in await asked(router, call()) for name in rank}


async def test_a_replica_whose_engine_is_not_ready_is_asked_last() -> None:
    router = Router(8)
    router._replicas[next(iter(router._replicas))].routing_stats = {"ready": False}
    _, _, rest = await asked(router, call())
    assert rest == ["r0"]


def test_an_address_where_nobody_listens_is_told_at_once_and_in_one_line() -> None:
    with pytest.raises(RayError, match=r"--address: 127\.0\.0\.1:1: no Ray cluster answers \(.*refused\)"):
        _connected("127.0.0.1:1")


def test_of_a_replica_that_did_not_start_the_cause_is_shown_and_not_the_frames() -> None:
    message = "Failed 3 times. Error:\n\x1b[36mray::Engine\x1b[39m\n  File x, line 1\nTokenizerError: no [such] folder\n"
    assert brief(message) == "Failed 3 times. Error: TokenizerError: no [such] folder"
    assert brief("") == ""


def test_the_status_as_json_has_a_line_of_a_message_without_traceback_and_colors() -> None:
    message = "Failed 3 times.\n\x1b[36mray::start()\x1b[39m\n  File x\n\x1b[1;31mError:\x1b[0m no folder"
    deployment = SimpleNamespace(
        status=SimpleNamespace(value="UNHEALTHY"), message=message, replica_states={}
    )
    reported: Any = SimpleNamespace(
        status=deployment.status, message=message, deployments={"engine": deployment}
    )
    values = shown(reported)
    assert (
        values["message"] == values["deployments"]["engine"]["message"] == "Failed 3 times. Error: no folder"
    )


def test_of_an_error_in_an_actor_the_cause_is_printed_and_not_the_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class ActorError(RuntimeError):
        cause = RuntimeError("Failed to bind to address '127.0.0.1:8000'.")

    with pytest.raises(typer.Exit), _ray_errors():
        raise ActorError("\x1b[36mray::ProxyActor.ready()\x1b[39m\n  File x, line 1")
    assert capsys.readouterr().err.startswith(
        "sluice: Failed to bind to address '127.0.0.1:8000'.\nsluice: not"
    )


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, None),
        ({"host": "127.0.0.1", "port": 8000}, None),
        ({"port": 9000}, "--port is 9000; this cluster's proxies have 8000"),
    ],
)
def test_an_address_that_the_running_proxies_do_not_have_is_refused(
    given: dict[str, Any], refused: str | None
) -> None:
    running = SimpleNamespace(http_config=SimpleNamespace(host="127.0.0.1", port=8000))
    serve = SimpleNamespace(context=SimpleNamespace(_get_global_client=lambda **_: running))
    with pytest.raises(RayError, match=refused) if refused else nullcontext():
        _start_proxies(serve, **{"host": None, "port": None, **given})


def test_what_keeps_a_deployment_from_running_is_printed_once_while_deploy_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks: list[str] = []

    def status() -> object:
        looks.append("")
        engine = SimpleNamespace(message="needs 64 [CPU]s\n" if len(looks) > 1 else "")
        return SimpleNamespace(applications={"sluice": SimpleNamespace(deployments={"Engine": engine})})

    with _messages(SimpleNamespace(status=status), "sluice", every_s=0.001):
        until = time.monotonic() + 60
        while len(looks) < 5 and time.monotonic() < until:
            time.sleep(0.001)
    assert capsys.readouterr().err == "sluice: needs 64 [CPU]s\n"
