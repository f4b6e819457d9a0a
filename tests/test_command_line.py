"""The arguments of the `sluice` command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from accounting import shadow_pairs
from accounting.writer import DATABASE_CALL_S
from gateway.batches.reading import MAX_LINE_BYTES
from gateway.config.engine import AdaptersConfig
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.wiring.access import require_first_key
from ops.cli.adapters import preload, verify
from ops.cli.batch import LINES, _follow
from ops.cli.doctor import admin_keys, examine
from ops.cli.main import app, hoisted
from ops.cli.operator import Operator
from ops.cli.routes import read_routing
from ops.cli.serve import banner
from ops.client import TIMEOUT_S, AdminClient, AdminError
from tests import fork_server


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["doctor", "--json"], ["doctor", "--json"]),
        (["--json", "doctor"], ["doctor", "--json"]),
        (
            ["--url", "http://x", "--json", "replay", "t.csv"],
            ["replay", "t.csv", "--url", "http://x", "--json"],
        ),
        (["--key=k", "replay", "t.csv"], ["replay", "t.csv", "--key=k"]),
        (["prompts", "--json", "show", "v1"], ["prompts", "show", "v1", "--json"]),
        (["prompts", "--key", "k", "list"], ["prompts", "list", "--key", "k"]),
        (["doctor", "--", "--json"], ["doctor", "--", "--json"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_options_of_all_commands_may_stand_before_or_after_the_word(
    given: list[str], meant: list[str]
) -> None:
    assert hoisted(given) == meant


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["serve", "--help"],
        ["doctor", "--help"],
        ["replay", "--help"],
        ["prompts", "render", "--help"],
    ],
)
def test_the_help_of_a_command_has_more_than_20_words(words: list[str]) -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", *words])
    assert done.returncode == 0
    assert len(done.stdout.split()) > 20


def commands_of(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command below a group with its words."""
    for name, one in group.commands.items():
        yield from commands_of(one, *words, name) if hasattr(one, "commands") else [((*words, name), one)]


def test_the_reason_of_a_change_is_the_same_option_in_every_command() -> None:
    named = {
        words: option.opts
        for words, command in commands_of(get_command(app))
        for option in command.params
        if {"-m", "--comment", "--message"} & {*option.opts}
    }
    assert len(named) > 10 and ("keys", "create") in named
    assert set(map(tuple, named.values())) == {("--comment", "--message", "-m")}


@pytest.mark.parametrize("width", ["70", "140"])
def test_a_paragraph_of_the_help_is_wrapped_by_the_width_of_the_terminal(width: str) -> None:
    done = CliRunner().invoke(app, ["keys", "change", "--help"], env={"COLUMNS": width})
    lines = [line.strip() for line in done.stdout.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("What is not given stays."))
    lengths = [len(line) for line in lines[first : lines.index("", first)]]
    assert len(lengths) == {"70": 3, "140": 2}[width]
    assert min(lengths[:-1]) > int(width) - 20


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_for_which_the_disk_is_full_is_told_without_a_traceback(
    unbuffered: str, options: list[str]
) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "ops.cli", "cost", *options]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr == "sluice: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_ends_a_command_without_a_word(options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "ops.cli", "cost", *options]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_command_whose_standard_streams_are_closed_does_the_same_without_them(
    closed: str, tmp_path: Path
) -> None:
    script = (
        f'"$0" -m ops.cli keys revoke key_1 --url http://127.0.0.1:9 {closed}; "$0" -m ops.cli cost {closed}'
    )
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert ("http://127.0.0.1:9: no answer" in done.stderr) is ("2>" not in closed)
    assert ("Inputs" in done.stdout) is (">&-" not in closed)


@pytest.mark.parametrize("words", [["evaluate", "adapter"], ["evaluate", "variant"]])
def test_a_command_that_parses_its_own_options_names_itself(words: list[str]) -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", *words, "--help"])
    assert done.stdout.startswith(f"usage: sluice {' '.join(words)} ")
    assert f"\n  sluice {' '.join(words)} " in done.stdout and "python -m" not in done.stdout


def test_an_unknown_word_is_told_without_a_traceback() -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", "dance"])
    assert done.returncode == 2
    assert "dance" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["version", "--json"], ["--json", "version"]])
def test_the_version_is_json_for_machines(words: list[str]) -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", *words])
    assert (done.returncode, list(json.loads(done.stdout))) == (0, ["version"]), done.stderr


def test_the_first_configuration_is_named_as_json(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ops.cli", "init", "--json"]
    done = fork_server.run(words, cwd=tmp_path)
    assert json.loads(done.stdout) == {"file": "sluice.yaml"}, done.stderr
    assert (tmp_path / "sluice.yaml").is_file()


def test_a_configuration_that_cannot_be_written_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "sluice.yaml").mkdir()
    words = [sys.executable, "-m", "ops.cli", "init", "--force"]
    done = fork_server.run(words, cwd=tmp_path)
    assert done.returncode == 1
    assert "sluice.yaml" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_server_that_does_not_speak_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        Thread(target=greet, daemon=True).start()
        with pytest.raises(AdminError, match=r"not HTTP \(BadStatusLine\); is the gateway running there"):
            AdminClient(f"http://127.0.0.1:{listener.getsockname()[1]}").get("admin", "keys")


IN_PROGRESS = {
    "status": "in_progress",
    "request_counts": dict.fromkeys(("total", "completed", "failed"), 1),
}


class Files(BaseHTTPRequestHandler):
    """A gateway with one ended batch, whose results end ``too_early``, before their stated length."""

    too_early = False

    def do_GET(self) -> None:
        ended = {"id": "b", "status": "completed", "output_file_id": "f", "error_file_id": None}
        body = json.dumps(ended).encode() if self.path == "/v1/batches/b" else b"{}\n" * 100_000
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: -1 if self.too_early and self.path != "/v1/batches/b" else None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("too_early", "output", "told"),
    [
        (False, "/dev/full", "sluice: /dev/full: cannot be written (No space left on device)"),
        (True, "results.jsonl", "the answer is cut off or not HTTP (IncompleteRead)"),
    ],
)
def test_results_of_a_batch_that_are_not_written_whole_are_an_error_that_names_the_cause(
    tmp_path: Path, too_early: bool, output: str, told: str
) -> None:
    handler = type("Handler", (Files,), {"too_early": too_early})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = ["batch", "results", "b", "-o", str(tmp_path / output)]
        done = CliRunner().invoke(app, [*words, "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert done.exit_code == 1 and told in done.output


@pytest.mark.slow
def test_the_wait_for_a_batch_outlasts_a_restart_of_the_gateway_and_no_refusal() -> None:
    statuses = iter((200, 503, 0, 200, 404))

    class Restarts(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (status := next(statuses)) == 0:
                return  # the connection ends without an answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"id": "b", **IN_PROGRESS}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Restarts) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = ["batch", "status", "b", "--wait", "--url", f"http://127.0.0.1:{server.server_port}"]
        done = CliRunner().invoke(app, words)
        server.shutdown()
    assert done.exit_code == 1 and "404 Not Found" in done.output
    assert "" not in done.stderr.splitlines(), "no line of a bar that only a terminal has"
    assert next(statuses, None) is None


@pytest.mark.slow
def test_the_wait_for_a_submitted_batch_begins_while_the_gateway_is_away(tmp_path: Path) -> None:
    statuses = iter((503, 404))

    class Leaves(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(200)

        def do_GET(self) -> None:
            self.answer(next(statuses))

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"id": "b", **IN_PROGRESS}).encode())

    (tmp_path / "lines.jsonl").write_text('{"url": "/v1/completions"}\n')
    with serving(Leaves) as url:
        words = ["batch", "submit", str(tmp_path / "lines.jsonl"), "--wait", "--url", url]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "404 Not Found" in done.output
    assert next(statuses, None) is None


@pytest.mark.slow
def test_an_export_of_usage_asks_for_pages_that_hold_up_no_stream_of_the_gateway(tmp_path: Path) -> None:
    asked: list[str] = []

    class Rows(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            page = {"rows": [{"generation_id": "gen_1"}], "next": "gen_1" if len(asked) == 1 else None}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Rows) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = ["usage", "export", "-o", str(tmp_path / "rows.csv")]
        done = CliRunner().invoke(app, [*words, "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert done.exit_code == 0, done.output
    assert asked == ["/admin/usage/rows?limit=1000", "/admin/usage/rows?limit=1000&after=gen_1"]
    assert (tmp_path / "rows.csv").read_text().splitlines() == ["generation_id", "gen_1", "gen_1"]


@pytest.mark.parametrize("words", [["usage", "export"], ["audit", "export"]])
def test_an_export_without_its_gateway_leaves_the_earlier_file_as_it_is(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "earlier").write_text("rows")
    done = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "earlier"), "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and "no answer" in done.stderr
    assert (tmp_path / "earlier").read_text() == "rows"


@pytest.mark.slow
def test_a_prompt_version_without_budgets_of_its_own_is_shown() -> None:
    version = {"id": "v1", "sha256": "ab", "published_at": None, "routes": ["chat"], "budgets": None}
    version |= {"reserve": None, "summarizer": "extractive", "volatile": None, "stable_text": "Be brief."}

    class Prompts(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(version).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Prompts) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = ["prompts", "show", "v1", "--url", f"http://127.0.0.1:{server.server_port}"]
        done = CliRunner().invoke(app, words)
        server.shutdown()
    assert done.exit_code == 0, done.output
    assert "budgets    as configured" in done.stdout and "Be brief." in done.stdout


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"{}\n", "requests.jsonl: line 1 has no url; give --endpoint"),
        (b'\r\n \n{"url": "/v1/completions"}\n', "is the gateway running there?"),
        (b'\xef\xbb\xbf{"url": "/v1/completions"}\n', "is the gateway running there?"),
    ],
    ids=["no url", "blank lines", "byte order mark"],
)
def test_a_batchs_endpoint_is_read_from_the_file_before_it_is_sent(
    tmp_path: Path, lines: bytes, told: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(lines)
    done = CliRunner().invoke(app, ["batch", "submit", str(file), "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and told in done.output


@pytest.mark.parametrize("endpoint", [[], ["--endpoint", "/v1/completions"]])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b"\n \n", "it is empty"),
        (b"\ncustom_id,url\n", "line 2 is not JSON"),
        (b"\xff\xd8\xff", "line 1 is not JSON"),
        pytest.param(b"[" * 200_000, "line 1 is not JSON", id="deep"),
        (b'["/v1/completions"]\n', "line 1 is not a JSON object"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_with_its_line_and_what_is_allowed(
    tmp_path: Path, content: bytes, fault: str, endpoint: list[str]
) -> None:
    (tmp_path / "requests.jsonl").write_bytes(content)
    words = ["batch", "submit", str(tmp_path / "requests.jsonl"), *endpoint, "--url", "http://127.0.0.1:9"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert done.stderr.endswith(f"requests.jsonl: {fault}; allowed: {LINES}\n")


@pytest.mark.parametrize(
    ("over", "told"), [(0, "is the gateway running there?"), (1, "line 1 has more than")]
)
def test_a_batchs_first_line_is_read_up_to_the_gateways_bound(tmp_path: Path, over: int, told: str) -> None:
    file = tmp_path / "requests.jsonl"
    line = b'{"url": "/v1/completions", "custom_id": "%s"}'
    file.write_bytes(line % (b"x" * (MAX_LINE_BYTES + over - len(line) + 2)) + b"\n{}\n")
    done = CliRunner().invoke(app, ["batch", "submit", str(file), "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and told in done.output


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server in a thread; its URL."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class RefusesBatches(BaseHTTPRequestHandler):
    """A gateway that stores a file, refuses its batch, and deletes the file."""

    deleted: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        stored = self.path == "/v1/files"
        told = {"id": "file-1"} if stored else {"error": {"code": "window_too_short", "message": "no"}}
        self.answer(200 if stored else 409, json.dumps(told))

    def do_DELETE(self) -> None:
        self.deleted.append(self.path)
        self.answer(200, "{}")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


def test_the_file_of_a_refused_batch_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"url": "/v1/completions"}\n')
    with serving(RefusesBatches) as url:
        done = CliRunner().invoke(app, ["batch", "submit", str(tmp_path / "lines.jsonl"), "--url", url])
    assert done.exit_code == 1 and "window_too_short" in done.stderr
    assert RefusesBatches.deleted == ["/v1/files/file-1"]


def test_a_repeat_of_a_submission_whose_answer_was_lost_sends_the_same_keys(tmp_path: Path) -> None:
    sent: list[tuple[str, str]] = []

    class LosesAnswers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            sent.append((self.path, self.headers["idempotency-key"]))
            if self.path == "/v1/files" or len(sent) > 2:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"id": "made"}')

    (tmp_path / "lines.jsonl").write_text('{"url": "/v1/completions"}\n')
    with serving(LosesAnswers) as url:
        words = ["batch", "submit", str(tmp_path / "lines.jsonl"), "--url", url]
        lost = CliRunner().invoke(app, words)
        told = re.search(r"--idempotency-key (\w+) a repeat", lost.stderr)
        assert lost.exit_code == 1 and told is not None
        assert CliRunner().invoke(app, [*words, "--idempotency-key", told[1]]).stdout == "made\n"
        assert CliRunner().invoke(app, words).exit_code == 0
    assert [path for path, _ in sent] == 3 * ["/v1/files", "/v1/batches"]
    assert sent[:2] == sent[2:4] and not set(sent[4:]) & set(sent[:4]), "a new command is a new batch"
    wrong = CliRunner().invoke(app, [*words, "--idempotency-key", "\n"])
    assert wrong.exit_code == 2 and "--idempotency-key" in wrong.stderr


class FailedBatches(BaseHTTPRequestHandler):
    """A gateway with two batches, each of which has a fault."""

    def do_GET(self) -> None:
        batch = {
            "status": "failed",
            "endpoint": "/v1/completions",
            "model": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "errors": {"data": [{"line": 1, "message": "the line is not JSON"}]},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "b1", **batch}, {"id": "b2", **batch}]}).encode())


def test_the_faults_of_several_batches_have_the_batchs_id() -> None:
    with serving(FailedBatches) as url:
        done = CliRunner().invoke(app, ["batch", "status", "--url", url])
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["b1: line 1: the line is not JSON", "b2: line 1: the line is not JSON"]


class OtherServer(BaseHTTPRequestHandler):
    """A server that is no gateway: each path has the same page."""

    def do_DELETE(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Welcome</html>")


class ListServer(BaseHTTPRequestHandler):
    """A server that is no gateway: each path has a JSON list."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[1]")


def test_an_answer_that_is_no_json_object_is_an_error_with_the_address() -> None:
    with serving(ListServer) as url:
        done = CliRunner().invoke(app, ["keys", "list", "--url", url])
    assert done.exit_code == 1 and not done.stdout
    assert f"{url}: the answer is not a JSON object; is the gateway running there?" in done.stderr


class ObjectServer(BaseHTTPRequestHandler):
    """A server that is no gateway: each path has the same JSON object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    do_POST = do_PATCH = do_GET


@pytest.mark.parametrize(
    ("command", "key"), [("keys list", "keys"), ("routes show", "revision"), ("usage report", "rows")]
)
def test_an_object_that_is_not_the_answer_is_an_error_with_the_address_and_what_it_lacks(
    command: str, key: str
) -> None:
    with serving(ObjectServer) as url:
        done = CliRunner().invoke(app, [*command.split(), "--url", url])
    assert done.exit_code == 1 and not done.stdout
    assert f"{url}: the answer has no '{key}'; is the gateway running there" in done.stderr


class SimilarServer(BaseHTTPRequestHandler):
    """A server that is no gateway: its objects have a gateway's outer keys only."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        rows = {name: [{"x": 1}] for name in ("keys", "entries", "revisions", "adapters")}
        self.wfile.write(json.dumps(rows).encode())


def test_what_an_inner_object_of_another_servers_answer_lacks_is_named() -> None:
    commands = {
        "audit verify": "number", "audit": "at", "audit export": "number", "routes history": "revision",
        "keys list": "id", "adapters list": "id",
    }  # fmt: skip
    with serving(SimilarServer) as url:
        for command, key in commands.items():
            done = CliRunner().invoke(app, [*command.split(), "--url", url])
            assert done.exit_code == 1, command
            assert f"{url}: the answer has no '{key}'; is the gateway running there" in done.stderr


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"number,at\n", "line 1 is not JSON; "),
        (b"\xff\xfe\n", "line 1 is not JSON; "),
        (b'{"at": 1}\n', "line 1 is not a record; "),
        (b"[1]\n", "line 1 is not a record; "),
        (b'{"number": 1, "at": 123456789012345678901234567890}\n', ""),
    ],
)
def test_a_file_that_is_no_exported_audit_log_is_refused_with_its_line(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "log").write_bytes(content)
    done = CliRunner().invoke(app, ["audit", "verify", "--file", str(tmp_path / "log")])
    assert done.exit_code == 1
    assert done.stderr.endswith(f"log: {fault}allowed: a file that `sluice audit export` wrote\n")


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("adapters promote v1 --yes", "'id' and no 'alias'"),
        ("adapters retire v1 --yes", "'id' and no 'alias'"),
        ("adapters show v1", "'id' and no 'alias'"),
        ("routes promote chat pool --yes", "'revision'"),
        ("canary pause", "'canary'"),
        ("keys create acme", "'key'"),
        ("keys change key_1 --rpm 1", "'id'"),
        ("batch cancel b1 --yes", "'id'"),
    ],
)
def test_a_change_is_not_said_to_be_made_where_another_server_answers(command: str, lacks: str) -> None:
    with serving(ObjectServer) as url:
        words = [*command.split(), "--url", url]
        for done in (CliRunner().invoke(app, [*words, *form]) for form in ([], ["--json"])):
            assert done.exit_code == 1 and not done.stdout
            assert f"{url}: the answer has no {lacks}; is the gateway running there" in done.stderr


def test_a_key_is_not_said_to_be_revoked_where_another_server_answers() -> None:
    with serving(OtherServer) as url:
        done = CliRunner().invoke(app, ["keys", "revoke", "key_1", "--url", url])
    assert done.exit_code == 1 and not done.stdout
    assert f"{url}: the answer is 200, not 204; is the gateway running there?" in done.stderr


def test_an_error_of_another_server_is_shown_with_its_address_and_what_was_expected_there() -> None:
    with serving(OtherServer) as url, pytest.raises(AdminError) as caught:
        AdminClient(url, kind="Prometheus server").get("api", "v1", "rules")
    assert str(caught.value).startswith(f"{url}: 501 Unsupported method")
    assert str(caught.value).endswith("; is the Prometheus server running there?")


class Interrupted(Operator):
    """An operator who presses Ctrl-C while a batch is looked at."""

    def get(self, *path: str, query: Any = None) -> Any:
        raise KeyboardInterrupt


def test_who_ends_the_wait_for_a_batch_knows_its_id_and_that_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _follow(Interrupted(), {"id": "batch_1", **IN_PROGRESS})
    assert "waiting for batch_1; Ctrl-C ends the wait, not the batch" in capsys.readouterr().err


class Waits(Operator):
    """A connection that records how long it would wait for an answer."""

    waited_s: ClassVar[list[float]] = []

    def post(self, *path: str, timeout_s: float = TIMEOUT_S, **body: Any) -> Any:
        self.waited_s.append(timeout_s)
        return {"id": "v1"}


def test_a_gateway_that_fetches_or_reads_a_large_adapter_is_waited_for() -> None:
    for command in (preload, verify):
        command(Waits(), "v1")
    assert min(Waits.waited_s) >= AdaptersConfig().fetch_timeout_seconds


def test_a_command_waits_longer_than_the_gateway_does_for_a_database_that_does_not_answer() -> None:
    assert max(DATABASE_CALL_S, shadow_pairs.TIMEOUT_S) + 2.0 < TIMEOUT_S


def test_to_wait_for_no_batch_is_refused() -> None:
    done = CliRunner().invoke(app, ["batch", "status", "--wait", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 2 and "--wait: needs the ID of a batch" in done.output


@pytest.mark.parametrize(
    ("admin", "public", "port"),
    [
        (None, "false", "http://a:1"),
        ("http://a:2", "false", "http://a:2"),
        ("http://a:2", "true", "http://a:1"),
    ],
)
def test_a_started_gateway_names_the_port_that_serves_the_documentation(
    admin: str | None, public: str, port: str
) -> None:
    lines = banner(
        "http://a:1", admin, "defaults", load_settings(None, {"SLUICE_SERVER__PUBLIC_METRICS": public})
    )
    assert f"  docs    {port}/docs" in lines
    assert (f"  admin   {admin}" in lines) is (admin is not None)


@pytest.mark.parametrize("word", ["serve", "init"])
def test_a_worker_that_is_no_address_is_named_with_what_is_allowed(tmp_path: Path, word: str) -> None:
    words = [sys.executable, "-m", "ops.cli", word, "--worker", "secret@foo"]
    done = fork_server.run(words, cwd=tmp_path)
    assert done.returncode != 0
    assert "--worker: 'foo' is not a worker's address; allowed: http://HOST:PORT" in done.stderr
    assert "--url" not in done.stderr and "secret" not in done.stderr


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["--worker", "http://127.0.0.1:9"], "sluice: not started"),
        (["--log-level", "loud"], "sluice: not started"),
        (
            ["--config", "absent.yaml"],
            "sluice: not started; `sluice doctor --config absent.yaml` checks everything at once",
        ),
    ],
)
def test_a_start_that_failed_advises_the_doctor_only_where_it_looks_at_the_same(
    words: list[str], last: str, tmp_path: Path
) -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", "serve", *words], cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == last


def test_an_unknown_level_of_the_log_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ops.cli", "serve", "--log-level", "loud"]
    done = fork_server.run(words, cwd=tmp_path)
    allowed = "debug, info, warning, error, critical"
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        f"sluice: --log-level is 'loud'; allowed: {allowed}",
    )


def test_a_gateway_that_has_stopped_ends_after_the_exit_handlers_and_waits_for_nothing_else() -> None:
    code = """
import atexit, threading
from ops.cli.serve import end_process
class Kept:
    def __del__(self, print=print):
        print("freed")
kept = Kept()
atexit.register(print, "handlers ran")
threading.Thread(target=threading.Event().wait).start()
print("stopped")
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "stopped\nhandlers ran\n", "")


@pytest.mark.parametrize(
    ("words", "given"),
    [(["keys", "create", "t", "--rpm", "-1"], "'-1'"), (["drain", "--wait", "soon"], "'soon'")],
)
def test_a_wrong_value_of_an_option_is_repeated(words: list[str], given: str) -> None:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"given: {given}" in done.stderr


@pytest.mark.parametrize("words", [["--gpu", "A10G"], ["--model", "llama-3.1-8b"], ["--prompt-tokens", "9"]])
def test_the_doctor_refuses_what_only_a_plan_uses(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == 2 and "need --plan" in done.output


def test_the_version_is_an_option_too() -> None:
    asked = [sys.executable, "-m", "ops.cli"]
    option, word = (fork_server.run([*asked, how], check=True).stdout for how in ("--version", "version"))
    assert option == word and option.startswith("sluice ")


@pytest.mark.parametrize("during", ["ops.cli.keys", "gateway.config.settings"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(during: str) -> None:
    code = f"""
import runpy, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "{during}":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["sluice", "serve"]
runpy.run_module("ops.cli", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_load_tool_without_its_extra_says_what_to_install() -> None:
    # In an interpreter of its own: here the load tools may be imported already.
    code = """
import sys
from collections.abc import Iterator
sys.modules["aiohttp"] = None
from ops.cli.main import app
for words in (["chaos", "soak"], ["replay", "trace.csv"]):
    try:
        app(words)
    except SystemExit as end:
        print(words[0], end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    told = "sluice: aiohttp is not installed: pip install 'sluice-gateway[replay]'\n"
    assert (done.stdout, done.stderr) == ("chaos 2\nreplay 2\n", 2 * told)


def test_a_process_that_is_not_there_is_named_before_a_chaos_run(tmp_path: Path) -> None:
    done = fork_server.run(
        [sys.executable, "-m", "ops.cli", "chaos", "soak", "--pid", "4194305"], cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (2, "sluice: --pid: there is no process 4194305\n")


@pytest.mark.parametrize(
    ("url", "admin", "auth", "warned"),
    [
        ("http://127.0.0.1:8000", None, False, False),
        ("http://[::1]:8000", "http://127.0.0.1:8001", False, False),
        ("http://0.0.0.0:8000", None, False, True),
        ("http://[::]:8000", "http://[::1]:8001", False, True),
        ("http://127.0.0.1:8000", "http://0.0.0.0:8001", False, True),
        ("http://0.0.0.0:8000", "http://0.0.0.0:8001", True, False),
    ],
)
def test_a_start_without_keys_on_an_address_of_the_network_warns(
    url: str, admin: str | None, auth: bool, warned: bool
) -> None:
    settings = load_settings(None, {"SLUICE_AUTH__ENABLED": str(auth).lower()})
    assert ("keys are off" in "\n".join(banner(url, admin, "defaults", settings))) is warned


@pytest.mark.parametrize(("admin_host", "good"), [("localhost", True), ("0.0.0.0", False)])
def test_doctor_finds_an_operators_port_without_keys_that_other_machines_reach(
    admin_host: str, good: bool
) -> None:
    given = {"AUTH__ENABLED": "false", "SERVER__ADMIN_PORT": "8001", "SERVER__ADMIN_HOST": admin_host}
    settings = load_settings(None, {f"SLUICE_{name}": value for name, value in given.items()})
    assert admin_keys(settings).ok is good


def test_a_gateway_that_is_asked_through_the_environments_proxy_in_vain_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://ann:s3cret@127.0.0.1:1")
    with pytest.raises(AdminError, match=r"the proxy of HTTP_PROXY; NO_PROXY=127\.0\.0\.1") as caught:
        AdminClient("http://127.0.0.1:2").get("ready")
    assert "s3cr" not in str(caught.value)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(AdminError, match=r"running there\?$"):
        AdminClient("http://127.0.0.1:2").get("ready")


@pytest.mark.parametrize("text", ["routes: &a {chat: *a}", "routes: 2026-01-01"])
def test_a_routing_file_that_json_cannot_hold_is_refused_by_its_name(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constructors = yaml.SafeLoader.yaml_constructors
    dated = "tag:yaml.org,2002:timestamp"  # as a dependency of vLLM changes it when it is imported
    monkeypatch.setitem(constructors, dated, constructors["tag:yaml.org,2002:str"])
    (tmp_path / "routing.yaml").write_text(text)
    done = CliRunner().invoke(app, ["routes", "apply", str(tmp_path / "routing.yaml"), "--yes"])
    assert done.exit_code == 1 and "routing.yaml: " in done.stderr and "allowed: what JSON can" in done.stderr


async def doctors_checks(folder: Path, **sections: Any) -> dict[str, Any]:
    """What `sluice doctor` finds, by name, for a pool whose worker is away and these sections."""
    config = {
        "engine": {"kind": "none"},
        "backends": {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "m"}},
        "state": {"url": "memory://"},
        "ledger": {"url": f"sqlite+aiosqlite:///{folder / 'l.db'}"},
        "batches": {"folder": str(folder / "files")},
        **sections,
    }
    (folder / "sluice.yaml").write_text(yaml.safe_dump(config))
    found = await examine(folder / "sluice.yaml", lambda _: nullcontext(print))
    return {check.check: check for check in found}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("url", "postgresql+asyncpg://ann:s3cret@db/x?sslmode=require", "has no parameter 'sslmode'"),
        ("journal_folder", "/dev/null/journal", "/dev/null/journal cannot be made"),
    ],
)
async def test_doctor_goes_on_after_a_ledger_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = {"url": f"sqlite+aiosqlite:///{tmp_path / 'l.db'}", key: value}
    found = await doctors_checks(tmp_path, ledger=ledger)
    assert not found["ledger"].ok and reason in found["ledger"].detail
    assert "prices" in found and "s3cret" not in str(found)


@pytest.mark.parametrize(
    "ledger", ["sqlite+aiosqlite:///state/sluice.db", "postgresql+asyncpg://127.0.0.1:9/x"]
)
async def test_doctor_makes_no_file_that_a_start_would_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = await doctors_checks(tmp_path, state={"url": "sqlite:///state/sluice.db"}, ledger={"url": ledger})
    assert os.listdir(tmp_path) == ["sluice.yaml"]
    made = "sqlite:///state/sluice.db; state/sluice.db is made at the first start"
    assert (found["state store"].ok, found["state store"].detail) == (True, made)
    reported = f"{ledger}; state/sluice.db is made" if "sqlite" in ledger else f"{ledger}: Connection"
    assert found["ledger"].detail.startswith(reported)


async def test_doctor_finds_a_place_where_a_start_cannot_make_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").touch()
    found = await doctors_checks(
        tmp_path,
        state={"url": "sqlite:///state/s.db"},
        ledger={"url": "sqlite+aiosqlite:///state/l.db"},
    )
    for check, file in (("state store", "s.db"), ("ledger", "l.db")):
        assert not found[check].ok
        assert f"state/{file} cannot be made ({tmp_path}/state is not a folder)" in found[check].detail


async def test_doctor_opens_files_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("s.db", "l.db"):
        (tmp_path / name).write_text("no database " * 100)
    found = await doctors_checks(tmp_path, state={"url": "sqlite:///s.db"})
    for check in ("state store", "ledger"):
        assert not found[check].ok and "SQLITE_NOTADB" in found[check].detail


async def test_doctor_says_why_a_store_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = await doctors_checks(
        tmp_path,
        state={"url": "redis://ann:s3cret@127.0.0.1:9"},
        ledger={"url": "postgresql+asyncpg://ann:s3cret@127.0.0.1:9/x"},
    )
    for check, reason in (("state store", "ConnectionError: "), ("ledger", "ConnectionRefusedError")):
        assert not found[check].ok and f": {reason}" in found[check].detail
    assert "s3cret" not in str(found)


async def test_doctor_goes_on_without_the_client_of_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "redis", None)
    cache = {"url": "redis://127.0.0.1:9/1"}
    found = await doctors_checks(tmp_path, state={"url": "redis://127.0.0.1:9"}, response_cache=cache)
    lacking = found["client of Redis"]
    assert not lacking.ok and lacking.detail == "not installed; needed by state.url, response_cache.url"
    assert "sluice-gateway[redis]" in lacking.hint and "state store" not in found
    assert found["ledger"].ok and found["prices"].ok


async def test_doctor_goes_on_after_a_routing_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = await doctors_checks(tmp_path, routing={"file": "nowhere.yaml"})
    assert not found["routing"].ok and "nowhere.yaml" in found["routing"].detail
    assert found["similar questions"].ok


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "verify", "--file"],
        ["audit", "verify", "--key-file"],
        ["prompts", "render"],
        ["cache", "calibrate", "--model", "m", "--pairs"],
    ],
)
def test_a_file_that_is_not_there_is_named_once_with_the_systems_reason(
    words: list[str], tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, [*words, str(tmp_path / "absent")])
    assert done.exit_code == 1 and done.stderr.count("absent") == 1
    assert done.stderr.endswith(": No such file or directory\n")


@pytest.mark.parametrize(
    "words",
    ["--rpm 5 --remove rpm", "--remove usd_per_day --usd-per-day 3", "--remove routes --route chat"],
)
def test_a_limit_that_a_change_of_a_key_both_sets_and_removes_is_refused(words: str) -> None:
    done = CliRunner().invoke(app, ["keys", "change", "key_1", *words.split()])
    removed = words.split()[words.split().index("--remove") + 1]
    assert done.exit_code == 1
    assert done.stderr == f"sluice: --remove {removed}: the command also sets it; allowed: one of both\n"


def test_what_routes_show_prints_as_json_is_a_routing_file(tmp_path: Path) -> None:
    config = {"routes": {"chat": {"backends": [{"name": "pool", "weight": 100.0}]}}}
    for name, content in (("file", config), ("shown", {"revision": 3, "author": "ann", "config": config})):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_routing(tmp_path / name) == config


@pytest.mark.parametrize(
    "key", ["s3cret" * 8 + "\n", "s3cret" * 8 + " ", "s3cret\r" * 8, "s3crét" * 8, "s3cret" * 8 + "鍵"]
)
def test_a_key_that_no_header_can_hold_is_refused_on_both_sides_and_not_shown(key: str) -> None:
    with pytest.raises(AdminError, match="white space at an end, or a character") as caught:
        AdminClient("http://127.0.0.1:1", key).get("admin", "keys")
    with pytest.raises(ConfigError, match="SLUICE_ADMIN_KEY has white space at an end") as refused:
        require_first_key(load_settings(None, {}), key)
    assert "s3cr" not in str(caught.value) + str(refused.value)
