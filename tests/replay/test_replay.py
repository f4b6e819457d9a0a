import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ops.replay.options import ContractName, Options, ReplayError
from ops.replay.report import ReplaySlo
from ops.replay.session import replay_trace
from tests.replay.fake_gateway import MAX_MODEL_LEN, OVERHEAD, Behaviour, FakeGateway, tokens_of

Azure = Callable[..., Path]
Options_ = Callable[..., Options]


@pytest.fixture
def options(gateway: FakeGateway) -> Options_:
    def make(trace: Path, **changes: Any) -> Options:
        return Options(trace=trace, url=gateway.url, **changes)

    return make


def always(behaviour: Behaviour) -> Callable[[int, dict[str, Any]], Behaviour]:
    return lambda number, body: behaviour


async def test_requests_arrive_when_the_trace_says_divided_by_the_speed(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    due = [0.0, 0.4, 0.5, 1.6, 1.6, 3.0]
    done = await replay_trace(options(azure(*((at, 30, 3) for at in due)), speed=4))
    sent = sorted((one.due_s, one.sent_s) for one in done.report.run.outcomes)
    assert [at for at, _ in sent] == pytest.approx([at / 4 for at in due])
    assert all(sent_s >= due_s - 0.001 for due_s, sent_s in sent), "never early"
    assert gateway.arrived == sorted(gateway.arrived)
    assert 0.74 <= sent[-1][1] < 3.0, "when the trace itself would send the last one"


@pytest.mark.parametrize("contract", list(ContractName))
async def test_prompts_have_the_traces_length_and_answers_its_bound(
    gateway: FakeGateway, azure: Azure, options: Options_, contract: ContractName
) -> None:
    rows = [(0.0, 374, 44), (0.01, 20, 7), (0.02, 200, 11)]
    done = await replay_trace(options(azure(*rows), contract=contract))
    prompts = [tokens_of(body["messages"][0]["content"]) + OVERHEAD for body in gateway.bodies]
    assert prompts == [374, 20, 200]
    asked = [body.get("max_tokens") or body["sampling"]["max_tokens"] for body in gateway.bodies]
    assert asked == [44, 7, 11]
    assert all(body["stream"] is True for body in gateway.bodies)
    assert done.report.tokens.input == done.report.tokens.asked_input == 594
    assert done.report.tokens.output == 62
    assert done.lexicon.overhead == OVERHEAD
    assert done.lexicon.calibrated


async def test_prompts_shorter_than_what_every_prompt_has_are_counted(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    done = await replay_trace(options(azure((0.0, 3, 2), (0.0, 60, 2))))
    assert done.below_overhead == 1
    assert min(o.input_tokens for o in done.report.run.outcomes) > OVERHEAD


async def test_lengths_are_scaled_and_clamped_to_what_the_gateway_tells(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    done = await replay_trace(options(azure((0.0, 300, 40), (0.0, 5000, 40)), scale_tokens=0.5))
    assert done.max_model_len == MAX_MODEL_LEN
    assert done.report.clamped == 1
    assert sorted(o.asked_input for o in done.report.run.outcomes) == [150, MAX_MODEL_LEN - 20 - 32]


@pytest.mark.parametrize("contract", list(ContractName))
async def test_reported_times_are_those_of_a_reader_of_the_stream(
    gateway: FakeGateway, azure: Azure, options: Options_, contract: ContractName
) -> None:
    gateway.behave = always(Behaviour(first_after_s=0.15, between_s=0.03))
    seen = []
    for _ in range(5):  # on a machine that stalls now and then, one of five runs is undisturbed
        done = await replay_trace(options(azure((0.0, 30, 6)), contract=contract))
        (outcome,) = done.report.run.outcomes
        assert outcome.ttft_s is not None and outcome.last_token_s is not None
        assert 0.149 <= outcome.ttft_s <= outcome.last_token_s <= outcome.total_s
        assert outcome.total_s >= 0.299, "the first token, and five more"
        assert outcome.tpot_s == pytest.approx((outcome.last_token_s - outcome.ttft_s) / 5)
        seen.append(outcome)
        if outcome.last_token_s - outcome.ttft_s >= 0.12:
            return
    raise AssertionError(f"the first token was never told from the last: {seen}")


@pytest.mark.parametrize("contract", list(ContractName))
async def test_every_way_to_fail_is_counted_by_its_code(
    gateway: FakeGateway, azure: Azure, options: Options_, contract: ContractName
) -> None:
    ways = [
        Behaviour(),
        Behaviour(status=503, code="queue_full"),
        Behaviour(status=429, code="rate_limited"),
        Behaviour(status=502),
        Behaviour(error_after=2, code="backend_unavailable"),
        Behaviour(cut_off_after=2),
        Behaviour(garbage=True),
        Behaviour(first_after_s=60.0),
    ]
    gateway.behave = lambda number, body: ways[number]
    rows = [(number / 100, 30, 5) for number in range(len(ways))]
    done = await replay_trace(options(azure(*rows), contract=contract, timeout_s=4.0))
    assert done.report.counts["errors"] == {
        "queue_full": 1, "rate_limited": 1, "http_502": 1, "backend_unavailable": 1, "client_cut_off": 1,
        "client_bad_answer": 1, "client_timeout": 1,
    }  # fmt: skip
    assert (len(done.report.whole), done.report.latency_ms["ttft"].count) == (1, 1)


@pytest.mark.parametrize("contract", list(ContractName))
async def test_fallbacks_backends_and_cached_tokens_are_told(
    gateway: FakeGateway, azure: Azure, options: Options_, contract: ContractName
) -> None:
    fallback = {"kind": "bedrock", "reason": "queue_full", "retry_after_ms": None}
    gateway.behave = lambda number, body: Behaviour(cached=16, fallback=fallback if number else None)
    done = await replay_trace(options(azure((0.0, 64, 3), (0.0, 64, 3)), contract=contract))
    assert done.report.counts["fallbacks"] == {"bedrock:queue_full": 1}
    assert done.report.counts["backends"] == {"embedded": 2}
    assert done.report.tokens.cached_share == 0.25


async def test_the_cap_holds_at_the_gateway_and_its_wait_is_reported_apart(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    gateway.behave = always(Behaviour(first_after_s=0.4))
    done = await replay_trace(options(azure(*((0.0, 30, 2) for _ in range(6))), concurrency=2))
    assert gateway.most_running == 2
    for one in done.report.run.outcomes:
        assert one.ttft_s is not None
        assert one.sent_s + one.ttft_s <= done.report.run.wall_s, "without the wait before it was sent"
    assert done.report.latency_ms["client_delay"].max >= 790, "two turns of 400 ms"


async def test_a_mooncake_trace_repeats_the_text_of_equal_blocks(
    gateway: FakeGateway, tmp_path: Path, options: Options_
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 5, "input_length": 1400, "output_length": 20, "hash_ids": [1, 2, 4]}\n'
        '{"timestamp": 9, "input_length": 1400, "output_length": 20, "hash_ids": [5, 6, 7]}\n'
    )
    done = await replay_trace(options(path, scale_tokens=0.1))
    texts = [body["messages"][0]["content"].split() for body in gateway.bodies]
    shared = [len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(*pair, strict=False))))
              for pair in itertools.combinations(texts, 2)]  # fmt: skip
    assert tokens_of(" ".join(texts[0][: shared[0]])) >= 100  # two blocks of 51 tokens
    assert shared[1] < 3 and shared[2] < 3
    assert [o.asked_input for o in done.report.run.outcomes] == [150, 140, 140]


async def test_two_replays_of_one_seed_send_the_same_text(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    trace = azure((0.0, 60, 2), (0.01, 61, 2))
    for _ in range(2):
        await replay_trace(options(trace, seed=5))
    first, second, *again = [body["messages"] for body in gateway.bodies if body["messages"]]
    assert [first, second] == [again[-2], again[-1]]


async def test_the_key_and_the_wish_for_no_fallback_travel_as_headers(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    await replay_trace(options(azure((0.0, 30, 2)), key="k-1", no_fallback=True, route="canary"))
    (headers,) = gateway.headers
    assert headers["Authorization"] == "Bearer k-1"
    assert headers["Prefer"] == "sluice-no-fallback"
    assert gateway.bodies[0]["route"] == "canary"


async def test_a_stop_cancels_what_is_under_way_at_the_gateway(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    gateway.behave = lambda number, body: Behaviour() if number == 0 else Behaviour(first_after_s=30)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(
            replay_trace(options(azure((0.0, 30, 2), (0.0, 30, 2), (50.0, 30, 2))), stop=stop)
        )
        await gateway.until(2)
        await asyncio.sleep(0.1)
        stop.set()
    found = running.result().report
    assert (found.run.interrupted, found.run.sent, len(found.whole), found.run.unfinished) == (True, 2, 1, 1)


@pytest.fixture(params=[404, 400], ids=["no /tokenize", "workers without a tokenizer"])
async def plain(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A gateway that cannot count the words' tokens."""

    async def refused(_: web.Request) -> web.Response:
        return web.json_response({}, status=request.param)

    app = FakeGateway(tokenize=False).app()
    app.router.add_post("/tokenize", refused)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def test_where_tokens_cannot_be_counted_lengths_are_guessed_and_the_report_says_so(
    plain: str, azure: Azure
) -> None:
    done = await replay_trace(Options(trace=azure((0.0, 50, 2)), url=plain))
    assert not done.lexicon.calibrated
    assert len(done.report.whole) == 1


async def test_a_refused_key_stops_before_the_load_and_says_what_to_do(
    gateway: FakeGateway, azure: Azure, options: Options_
) -> None:
    gateway.probe = False
    gateway.behave = always(Behaviour(status=401, code="invalid_key"))
    with pytest.raises(ReplayError, match="the first request failed with invalid_key"):
        await replay_trace(options(azure((0.0, 30, 2))))
    assert gateway.bodies == []


async def test_a_gateway_that_is_not_there_is_told_with_what_to_do(azure: Azure) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ReplayError, match=r"cannot be reached \(.*Connect call failed.*make run"):
            await replay_trace(Options(trace=azure((0.0, 30, 2)), url=url))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 0.0}, "--speed: 0.0 is not allowed"),
        ({"speed": float("nan")}, "--speed: nan"),
        ({"scale_tokens": -1.0}, "--scale-tokens: -1.0"),
        ({"timeout_s": float("inf")}, "--timeout: inf"),
        ({"slo": ReplaySlo(0, 1)}, "--slo-ttft-ms: 0"),
        ({"url": "localhost:8000"}, "--url: not an http"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError) as caught:
        Options(trace=Path("t"), **changes)
    assert message in str(caught.value)
