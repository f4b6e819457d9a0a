import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.replay.load import ReplayRun
from ops.replay.outcome import ReplayedRequest
from ops.replay.plot import draw
from ops.replay.report import ReplayReport, ReplaySlo
from tests.fork_server import ForkedPopen
from tests.replay.fake_gateway import Behaviour, FakeGateway

Azure = Callable[..., Path]
ROOT = Path(__file__).parents[2]
COMMAND = "import typer; from ops.cli.replay import replay; app = typer.Typer(); app.command()(replay); app()"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}


def start(*arguments: str) -> subprocess.Popen[str]:
    return ForkedPopen(
        [sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, env={**ENVIRONMENT, "COLUMNS": "120"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate, timeout=60)
    return process.returncode, out, err


async def run(*arguments: str) -> tuple[int, str, str]:
    return await ended(start(*arguments))


def picture(path: Path) -> tuple[int, int]:
    """Return the width and height of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


async def test_a_replay_prints_tables_writes_json_and_a_picture(
    gateway: FakeGateway, azure: Azure, tmp_path: Path
) -> None:
    gateway.behave = lambda number, body: Behaviour(between_s=0.005)
    trace, figures, plot = (
        azure(*((n / 20, 60, 5) for n in range(20))),
        tmp_path / "r.json",
        tmp_path / "r.png",
    )
    code, out, err = await run(
        str(trace), "--url", gateway.url, "--speed", "2", "--plot", str(plot), "--output", str(figures)
    )
    assert (code, err) == (0, "")
    told = ("TTFT", "TPOT", "client-side delay", "goodput/s", "cached tokens", "time / 2", "by the trace")
    for words in told:
        assert words in out
    found = json.loads(figures.read_text())
    assert found["requests"] == {
        "sent": 20, "completed": 20, "errors": 0, "unfinished": 0, "clamped": 0, "interrupted": False,
    }  # fmt: skip
    assert found["options"]["speed"] == 2
    assert found["trace"]["rows"] == 20
    width, height = picture(plot)
    assert width > 1000 and height > 600


async def test_a_trace_may_become_a_batchs_file(gateway: FakeGateway, azure: Azure, tmp_path: Path) -> None:
    trace, out = azure(*((n / 20, 60, 5 + n) for n in range(4))), tmp_path / "lines.jsonl"
    code, printed, err = await run(str(trace), "--url", gateway.url, "--as-batch", str(out))
    assert (code, err) == (0, "") and "4 requests in" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["r0", "r1", "r2", "r3"]
    assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/generate")}
    assert [line["body"]["sampling"]["max_tokens"] for line in lines] == [5, 6, 7, 8]
    assert not any("stream" in line["body"] for line in lines)


async def test_json_on_standard_output_is_alone_there_and_holds_no_key(
    gateway: FakeGateway, azure: Azure
) -> None:
    code, out, err = await run(str(azure((0.0, 30, 2))), "--url", gateway.url, "--json", "--key", "k-secret")
    assert code == 0
    assert json.loads(out)["schema"] == 1
    assert "TTFT" in err
    assert "k-secret" not in out + err


@pytest.mark.parametrize(("allowed", "expected"), [((), 1), (("--max-errors", "1"), 0)])
async def test_more_errors_than_allowed_are_a_failure(
    gateway: FakeGateway, azure: Azure, allowed: tuple[str, ...], expected: int
) -> None:
    gateway.behave = lambda number, body: (
        Behaviour(status=503, code="queue_full") if number == 0 else Behaviour()
    )
    code, out, _ = await run(str(azure((0.0, 30, 2), (0.1, 30, 2))), "--url", gateway.url, *allowed)
    assert code == expected
    assert "queue_full 1" in out


async def test_what_prevents_a_start_is_one_line_and_exit_code_two(azure: Azure, tmp_path: Path) -> None:
    code, out, err = await run(str(tmp_path / "none.csv"))
    assert (code, out) == (2, "")
    assert "No such file" in err and "Traceback" not in err
    code, _, err = await run(str(azure((0.0, 1, 1))), "--contract", "soap")
    assert code == 2
    assert "'soap'" in err and "'openai'" in err and "Traceback" not in err
    code, _, err = await run(str(azure((0.0, 1, 1))), "--model", "m")
    assert code == 2 and "--model: the native contract has none; add --contract openai" in err
    for option in ("--plot", "--output", "--as-batch"):
        code, _, err = await run(str(azure((0.0, 1, 1))), option, str(tmp_path / "no" / "x"))
        assert code == 2
        assert f"{option}: no folder" in err


async def test_numbers_out_of_range_are_refused_by_their_option(azure: Azure) -> None:
    for option, number in (
        ("--limit", "-1"), ("--skip", "-1"), ("--concurrency", "-1"), ("--max-model-len", "0"),
    ):  # fmt: skip
        code, _, err = await run(str(azure((0.0, 30, 2))), option, number)
        assert code == 2 and f"Invalid value for '{option}'" in err


async def test_ctrl_c_stops_cleanly_and_prints_what_there_is(gateway: FakeGateway, azure: Azure) -> None:
    gateway.behave = lambda number, body: Behaviour() if number < 2 else Behaviour(first_after_s=50)
    process = start(str(azure((0.0, 30, 2), (0.0, 30, 2), (0.0, 30, 2), (55.0, 30, 2))), "--url", gateway.url)
    await gateway.until(3)
    await asyncio.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, out, err = await ended(process)
    assert code == 130
    assert "Traceback" not in err
    assert "2 answered, 1 aborted" in out
    assert "Stopped before the end of the trace" in out


async def test_ctrl_c_before_the_load_ends_the_command_at_once(azure: Azure) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        process = start(str(azure((0.0, 30, 2))), "--url", f"http://127.0.0.1:{port}")
        await asked.wait()
        process.send_signal(signal.SIGINT)
        code, out, err = await ended(process)
    assert (code, out, err) == (130, "", "")


async def test_help_teaches_with_an_example() -> None:
    code, out, _ = await run("--help")
    assert code == 0
    for words in (
        "sluice replay benchmarks/data/azure_llm_conv_2023_2000.csv",
        "--scale-tokens",
        "Exit code",
    ):
        assert words in out


async def test_importing_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, ops.cli.replay; "
        "print([m for m in ('aiohttp', 'matplotlib', 'numpy', 'rich.progress', 'torch') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


@pytest.mark.parametrize("outcomes", [[], [ReplayedRequest(0, 0, 0, 1, 1, 0.5, code="queue_full")]])
def test_a_replay_without_an_answer_still_has_a_picture(
    tmp_path: Path, outcomes: list[ReplayedRequest]
) -> None:
    path = tmp_path / "empty.png"
    run = ReplayRun(outcomes=outcomes, sent=len(outcomes), wall_s=1.0)
    draw(path, ReplayReport(run, ReplaySlo(200, 1400)), title="t", subtitle="s")
    assert picture(path)[0] > 1000
