"""The audit log: chained by hashes across processes, and required where the configuration says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from gateway.config.errors import ConfigError
from gateway.config.secret_keys import read_keys
from gateway.config.settings import Settings
from gateway.errors import BackendUnavailable
from gateway.state.audit import KEY_VARIABLE, STREAM, Audit, AuditBroken, digest, verify
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.wiring.foundation import make_foundation
from ops.cli.main import app
from ops.client import AdminClient

KEY, OTHER = b"k" * 32, b"o" * 32


def audit(streams: MemoryStreams, *, required: bool = False, keys: Sequence[bytes] = ()) -> Audit:
    store = MemoryStateStore(streams, unix_time=lambda: 1.0, poll_s=0.05)
    return Audit(store, unix_time=lambda: 1_800_000_000.25, required=required, keys=keys)


async def written(streams: MemoryStreams, count: int = 4, keys: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    log = audit(streams, keys=keys)
    for number in range(count):
        await log.record(
            "key_1", "routing.apply", f"routing {number}", comment="漫画 \x7f\ud800"[: 3 + number % 2]
        )
    return [dict(one) for one in await log.entries(after=0)]


async def test_each_record_holds_the_hash_of_the_one_before() -> None:
    entries = await written(MemoryStreams())
    assert [one["previous"] for one in entries] == ["", *(one["hash"] for one in entries[:-1])]
    found = verify(entries)
    assert (found.records, found.hashes[-1]) == (4, entries[-1]["hash"])
    assert verify([]).records == 0
    assert verify(json.loads(json.dumps(entries))).hashes == found.hashes


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("done", ["changed", "removed", "put in", "swapped"])
async def test_a_changed_removed_or_inserted_record_is_found_at_its_place(done: str, at: int) -> None:
    streams = MemoryStreams()
    await written(streams)
    records = streams.records[STREAM]
    if done == "changed":
        other = {**orjson.loads(records[at].data), "who": "key_2"}
        records[at] = replace(records[at], data=orjson.dumps(other))
    elif done == "removed":
        del records[at]
        records[:] = [replace(one, number=number) for number, one in enumerate(records, 1)]
    elif done == "put in":
        records.insert(at + 1, records[at])
        records[:] = [replace(one, number=number) for number, one in enumerate(records, 1)]
    else:
        a, b = records[at], records[at + 1]
        records[at : at + 2] = [replace(b, number=a.number), replace(a, number=b.number)]
    with pytest.raises(AuditBroken, match=rf"record {at + 1 + (done in ('changed', 'put in'))} "):
        verify(await audit(streams).entries(after=0))


async def test_a_change_that_makes_its_own_hash_right_breaks_the_next_one() -> None:
    entries = await written(MemoryStreams())
    with pytest.raises(AuditBroken, match="record 2 is not what"):
        verify([entries[0], {**entries[1], "who": "key_2"}, *entries[2:]])
    with pytest.raises(AuditBroken, match="record 3 is missing"):
        verify([*entries[:2], entries[3]])


async def test_processes_that_write_at_once_make_one_chain() -> None:
    streams = MemoryStreams()
    logs = [audit(streams) for _ in range(4)]
    await asyncio.gather(*(log.record(f"key_{n}", "x", "y") for n, log in enumerate(logs * 5)))
    assert verify(await logs[0].entries(after=0)).records == 20


@pytest.mark.parametrize("at", [0, 2])
async def test_a_record_without_the_hash_of_the_one_before_breaks_the_log(at: int) -> None:
    streams = MemoryStreams()
    await written(streams)
    records = streams.records[STREAM]
    bare = {name: value for name, value in orjson.loads(records[at].data).items() if name != "previous"}
    records[at] = replace(records[at], data=orjson.dumps(bare))
    with pytest.raises(AuditBroken, match=rf"record {at + 1} does not hold the hash"):
        verify(await audit(streams).entries(after=0))


async def test_a_change_is_refused_before_it_begins_when_its_record_is_required_and_cannot_be_written() -> (
    None
):
    streams, changes = MemoryStreams(), list[str]()

    async def change(action: str, *, required: bool = False) -> None:
        async with audit(streams, required=required).attempt("key_1", action, "k"):
            changes.append("made")

    for required in (False, True):
        await change("key.create", required=required)
    assert [one["result"] for one in await audit(streams).entries(after=0)] == ["done", "begun", "done"]
    streams.down = True
    with pytest.raises(BackendUnavailable, match=r"key\.revoke: its audit record cannot be written"):
        await change("key.revoke", required=True)
    assert len(changes) == 2
    # Fail-open unless configured: the change is made, and only the log line records it.
    await change("key.revoke")
    assert len(changes) == 3


def chained_again(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log as a writer without the key would forge it, with correct hashes."""
    again: list[dict[str, Any]] = []
    for one in entries:
        other = {**one, "previous": again[-1]["hash"] if again else ""}
        again.append({**other, "hash": digest(other)})
    return again


async def test_an_action_whose_operator_leaves_is_recorded() -> None:
    log, begun = audit(MemoryStreams()), asyncio.Event()

    async def change() -> None:
        async with log.attempt("key_1", "adapter.promote.forced", "v1"):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(change())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (entry,) = await log.entries(after=0)
    assert (entry["action"], entry["result"].split(":")[0]) == ("adapter.promote.forced", "cancelled")


async def test_who_can_write_the_whole_chain_again_cannot_sign_it() -> None:
    streams = MemoryStreams()
    await written(streams, 2)
    entries = await written(streams, 3, [KEY])
    found = verify(entries, [KEY])
    assert (found.records, found.unsigned) == (5, 2)
    for at in range(5):
        forged = chained_again([{**one, "who": "key_2"} if n == at else one for n, one in enumerate(entries)])
        verify(forged)  # the hashes alone do not reveal the forgery
        with pytest.raises(AuditBroken, match=rf"record {max(at + 1, 3)} is not signed with the key"):
            verify(forged, [KEY])
    for n in (3, 4):
        bare = [{k: v for k, v in one.items() if k != "mac" or one["number"] != n} for one in entries]
        with pytest.raises(AuditBroken, match=f"record {n} |record {n + 1} "):
            verify(chained_again(bare), [KEY])
    with pytest.raises(AuditBroken, match="no record is signed"):
        verify(chained_again([{k: v for k, v in one.items() if k != "mac"} for one in entries]), [KEY])
    with pytest.raises(AuditBroken, match="record 3 is not signed with the key"):
        verify(entries, [OTHER])


async def test_a_new_key_signs_while_the_old_one_still_verifies() -> None:
    streams = MemoryStreams()
    await written(streams, 1, [KEY])
    entries = await written(streams, 1, [OTHER, KEY])
    assert verify(entries, [OTHER, KEY]).unsigned == 0
    with pytest.raises(AuditBroken, match="record 2 is not signed"):
        verify(entries, [KEY])


def test_keys_are_read_from_a_file_or_the_environment_and_never_repeated(tmp_path: Path) -> None:
    file, environ = tmp_path / "keys", {"SLUICE_AUDIT_KEY": KEY.decode()}
    file.write_bytes(OTHER + b"\n" + KEY + b"\n")
    assert read_keys("audit.key_file", None, KEY_VARIABLE, {}) == ()
    assert read_keys("audit.key_file", None, KEY_VARIABLE, environ) == (KEY,)
    assert read_keys("audit.key_file", file, KEY_VARIABLE, environ) == (OTHER, KEY)
    for unusable in (b"", b"secret", OTHER + b"\nsecret", b"\xffsecret" * 9):
        file.write_bytes(unusable)
        with pytest.raises(ConfigError, match=r"32 or more|cannot be read") as refused:
            read_keys("audit.key_file", file, KEY_VARIABLE, {})
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys("audit.key_file", tmp_path / "none", KEY_VARIABLE, environ)


async def test_a_gateway_signs_with_the_key_of_its_environment_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    sections: dict[str, Any] = {
        "engine": {"kind": "none", "model": "models/demo"},
        "backends": {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "m"}},
        "state": {"url": "memory://"},
    }
    keyed = {**sections, "audit": {"key_file": str(file)}}

    async def record(sections: dict[str, Any]) -> list[dict[str, Any]]:
        log = make_foundation(Settings.model_validate(sections)).audit
        await log.record("key_1", "routing.apply", "routing")
        return [dict(one) for one in await log.entries(after=0)]

    assert "mac" not in (await record(sections))[0]
    monkeypatch.setenv("SLUICE_AUDIT_KEY", OTHER.decode())
    assert verify(await record(sections), [OTHER]).unsigned == 0
    file.write_bytes(KEY)
    assert verify(await record(keyed), [KEY]).unsigned == 0
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"^audit\.key_file: .*32 or more"):
        await record(keyed)


async def test_the_command_checks_signatures_where_it_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = MemoryStreams()
    await written(streams, 1)
    entries = await written(streams, 2, [KEY])
    log, keys = tmp_path / "audit.jsonl", tmp_path / "keys"
    log.write_text("".join(json.dumps(one) + "\n" for one in entries))
    keys.write_bytes(KEY)

    def verified(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["audit", "verify", "--file", str(log), *words])
        assert done.exit_code == code, done.output
        return done.output

    assert "signed" not in verified()
    assert "3 records, 2 signed" in verified("--key-file", str(keys))
    monkeypatch.setenv("SLUICE_AUDIT_KEY", OTHER.decode())
    assert "record 2 is not signed with the key" in verified(code=1)
    assert "3 records, 2 signed" in verified("--key-file", str(keys))
    keys.write_text("short")
    assert "32 or more" in verified("--key-file", str(keys), code=1)


async def test_the_command_exports_and_verifies_and_finds_what_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = await written(MemoryStreams(), 5)

    def answer(client: AdminClient, *path: str, query: dict[str, int], **_: object) -> Any:
        assert path == ("admin", "audit")
        return {"entries": [one for one in entries if one["number"] > query["after"]][:2]}

    monkeypatch.setattr(AdminClient, "get", answer)

    def sluice(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["audit", *words])
        assert done.exit_code == code, done.output
        return done.output

    assert f"5 records; the last one's hash: {entries[-1]['hash']}" in sluice("verify")
    assert "5 records" in sluice("verify", "--head", entries[2]["hash"])
    file = tmp_path / "audit.jsonl"
    sluice("export", "-o", str(file))
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == entries
    assert json.loads(sluice("verify", "--file", str(file), "--json"))["records"] == 5
    file.write_text(file.read_text(encoding="utf-8").replace("key_1", "key_2", 1), encoding="utf-8")
    assert "tampered with: record 1 " in sluice("verify", "--file", str(file), code=1)
    del entries[3:]
    assert "was truncated" in sluice("verify", "--head", "0" * 64, code=1)
