"""`sluice batch`: run a file of requests on idle capacity."""

import json
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from ops.cli.console import opened, print_json, print_rows, print_text, progress_bar
from ops.cli.operator import Operator, Yes, command_group, confirm, operator_command
from ops.client import AdminError, GatewayAway

AT = ("v1", "batches")
FILES = ("v1", "files")
ENDED = ("completed", "failed", "expired", "cancelled")
LOOK_S = 1.0
AWAY_S = 600.0  # longest time that a wait for a batch continues without a gateway: a restart loads the model
UPLOAD_TIMEOUT_S = 600.0
MAX_LINE_BYTES = 8 << 20  # as the gateway's bound for a line
MAX_KEY = 200  # as the gateway's bound for an Idempotency-Key, with room for what it is for
LINES = "JSON lines, each a request with custom_id, method, url and body"

batch = command_group("batch", "Batches: run files of requests on idle capacity.")

Id = Annotated[str, typer.Argument(metavar="ID", help="A batch's id.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the batch's end; exit code 1 unless completed.")]


@operator_command(batch, "submit")
def submit(
    gateway: Operator,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines, each a request with a custom_id.")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="API path of the requests, as /v1/chat/completions; default: the url of the first line."
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(help="Time in which it must be completed: minutes, hours or days, as in 24h.")
    ] = "24h",
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            help="The same command with the same key starts one batch within 24 h; default: a new key."
        ),
    ] = None,
    wait: Wait = False,
) -> None:
    """Upload a file and start a batch; prints the batch's id on standard output.

    Example: sluice batch submit requests.jsonl --wait
    """
    key = idempotency_key or uuid.uuid4().hex
    if not (key.isascii() and key.isprintable() and len(key) <= MAX_KEY):
        allowed = f"allowed: 1 to {MAX_KEY} printable ASCII characters"
        raise typer.BadParameter(allowed, param_hint="--idempotency-key")
    try:
        with file.open("rb") as source:
            endpoint = _endpoint(file, source, endpoint)
    except OSError as error:
        raise AdminError(f"{file}: {error.strerror}") from None
    client = gateway.client(UPLOAD_TIMEOUT_S)
    sent = {"idempotency-key": f"file:{key}"}
    stored = client.upload(*FILES, file=file, fields={"purpose": "batch"}, headers=sent)
    try:
        asked = {"input_file_id": stored["id"], "endpoint": endpoint, "completion_window": window}
        made = gateway.client().post(*AT, body=asked, headers={"idempotency-key": f"batch:{key}"})
    except GatewayAway as error:  # the batch may have been created, and only its answer was lost
        raise AdminError(f"{error}. With --idempotency-key {key} a repeat starts no second batch") from None
    except AdminError:
        if idempotency_key is None:  # else a repeat uses the file
            with suppress(AdminError):
                client.delete(*FILES, stored["id"], status=200)
        raise
    if wait:
        _follow(gateway, made)
    elif gateway.as_json:
        print_json(made)
    else:
        print(made["id"])
        print(f"sluice batch status {made['id']} --wait follows it", file=sys.stderr)


@operator_command(batch, "status")
def status(
    gateway: Operator,
    id: Annotated[
        str | None, typer.Argument(metavar="ID", help="A batch's id; default: the last 20.")
    ] = None,
    wait: Wait = False,
) -> None:
    """Show the progress of batches.

    Example: sluice batch status batch_0a1b2c3d4e5f --wait
    """
    if wait and id is None:
        raise typer.BadParameter("needs the ID of a batch", param_hint="--wait")
    if id is not None and wait:
        _follow(gateway, gateway.get(*AT, id))
    elif id is not None:
        gateway.show(gateway.get(*AT, id), lambda one: _print([one]))
    else:
        gateway.show(gateway.get(*AT), lambda found: _print(found["data"]))


@operator_command(batch, "results")
def results(
    gateway: Operator,
    id: Id,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file; default: standard output.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Write the failed lines instead.")] = False,
) -> None:
    """Write the results of an ended batch as JSON lines.

    Example: sluice batch results batch_0a1b2c3d4e5f -o results.jsonl
    """
    one = gateway.get(*AT, id)
    name = "error_file_id" if errors else "output_file_id"
    if one["status"] not in ENDED:
        raise AdminError(f"{id} is {one['status']}; results are available when it has ended")
    if one[name] is None:
        raise AdminError(f"{id} has no {'errors' if errors else 'results'}; it is {one['status']}")
    with opened(output) as target:
        target.buffer.writelines(gateway.client(UPLOAD_TIMEOUT_S).pieces(*FILES, one[name], "content"))


@operator_command(batch, "cancel")
def cancel(gateway: Operator, id: Id, yes: Yes = False) -> None:
    """Cancel a batch: no further line starts; lines that have ended stay in the results.

    Example: sluice batch cancel batch_0a1b2c3d4e5f --yes
    """
    confirm(f"Cancel {id}? Lines that have not run will not run.", yes)
    gateway.show(gateway.post(*AT, id, "cancel"), lambda one: _print([one]), has=("id",))


def _endpoint(file: Path, source: BinaryIO, given: str | None) -> str:
    """The given endpoint, or the url of the first line. Raises AdminError: the file is no batch."""
    lines = iter(lambda: source.readline(MAX_LINE_BYTES + 1), b"")
    found = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), None)
    if found is None:
        raise AdminError(f"{file}: it is empty; allowed: {LINES}")
    number, line = found
    if len(line.rstrip(b"\n")) > MAX_LINE_BYTES:
        raise AdminError(f"{file}: line {number} has more than {MAX_LINE_BYTES} bytes")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise AdminError(f"{file}: line {number} is not JSON; allowed: {LINES}") from None
    if not isinstance(request, dict):
        raise AdminError(f"{file}: line {number} is not a JSON object; allowed: {LINES}")
    if given is None and "url" not in request:
        raise AdminError(f"{file}: line {number} has no url; give --endpoint")
    return given or str(request["url"])


def _follow(gateway: Operator, one: Any) -> None:
    """Wait for a batch's end; ``one`` is its object as the gateway last gave it."""
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    through_restarts = Retrying(
        retry=retry_if_exception_type(GatewayAway),
        stop=stop_after_delay(AWAY_S),
        wait=wait_fixed(LOOK_S),
        reraise=True,
    )
    print(f"waiting for {one['id']}; Ctrl-C ends the wait, not the batch", file=sys.stderr)
    with progress_bar() as bar:
        task = bar.add_task("validating", total=None)
        while one["status"] not in ENDED:
            counts = one["request_counts"]
            bar.update(
                task,
                description=one["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
            time.sleep(LOOK_S)
            one = through_restarts(gateway.get, *AT, one["id"])
    gateway.show(one, lambda shown: _print([shown]))
    if one["status"] != "completed":
        raise typer.Exit(1)


def _print(found: list[dict[str, Any]]) -> None:
    rows = [
        (
            one["id"],
            one["status"],
            one["endpoint"],
            one["model"] or "",
            *(one["request_counts"][name] for name in ("total", "completed", "failed")),
        )
        for one in found
    ]
    print_rows(("batch", "status", "endpoint", "model", "lines", "completed", "failed"), rows)
    for one in found:
        for fault in (one["errors"] or {}).get("data", ()):
            at = "" if fault["line"] is None else f"line {fault['line']}: "
            print_text(f"{one['id']}: {at}{fault['message']}")
