"""The registry in several gateways at once: changes, imports, loaded adapters, and answers to operators."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from structlog.testing import capture_logs

from adapters import changes
from adapters.catalogue import AdapterState, CatalogueError
from adapters.changes import NotEvaluatedError
from adapters.errors import AdapterNotHere, AdapterRejected, Rejection, UnknownAdapter
from adapters.events import AdapterLoaded, AdapterUnloaded
from adapters.values import Adapter, Selection
from gateway.admin.adapters import AddBody, CommentBody, PromoteBody, ReportBody, RollbackBody
from gateway.config.adapters_file import RegistryContent
from gateway.errors import BackendUnavailable, InvalidRequest, NoSuchAdapter
from gateway.lora.registry import STREAM
from gateway.state.memory import MemoryStreams
from gateway.state.port import MAX_RECORD_BYTES
from gateway.weights.errors import FetchError, NotThere
from gateway.weights.values import OnProgress, Progress, ignore
from resilience.failures import BackendFailure
from tests.adapters import crafted
from tests.adapters.registry_gateway import FakeEngine, RegistryGateway, gateway, until

FORCED = PromoteBody(force=True)


def write(folder: Path, name: str, value: float = 0.25) -> str:
    """An adapter whose content depends on ``value``."""
    tensors = {
        key: (kind, shape, crafted.floats(len(data) // 4, value))
        for key, (kind, shape, data) in crafted.tensors().items()
    }
    return str(crafted.write(folder / name, weights=crafted.safetensors(tensors)))


def uses(one: RegistryGateway, name: str, *, operator: bool = False) -> str:
    with one.registry.lease(Selection(name, operator=operator)) as lease:
        assert lease.adapter is not None
        return lease.adapter.adapter_id


async def test_a_change_in_one_gateway_is_in_force_in_the_other_soon(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, gateway(streams, tmp_path / "2") as other:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a"), labels={"k": "x"}), who="key_1")
        await one.admin.add(AddBody(id="v2", location=write(tmp_path, "b", 0.5)), who="key_1")
        await one.admin.promote("v1", PromoteBody(alias="style", force=True), who="key_1")
        assert uses(one, "style") == "v1"
        await until(lambda: "style" in other.registry.ids, within_s=10.0)
        assert uses(other, "style") == "v1"
        await other.admin.promote("v2", PromoteBody(alias="style", force=True), who="key_2")
        await until(lambda: uses(one, "style") == "v2", within_s=10.0)
        await one.admin.roll_back("style", RollbackBody(), who="key_1")
        await until(lambda: uses(other, "style") == "v1", within_s=10.0)
        assert one.projection.catalogue == other.projection.catalogue


async def test_a_dry_run_shows_the_result_or_the_refusal_and_changes_nothing(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one:
        for name, value in (("v1", 0.25), ("v2", 0.5)):
            await one.admin.add(AddBody(id=name, location=write(tmp_path, name, value)), who="key_1")
        await one.admin.promote("v1", PromoteBody(alias="style", force=True), who="key_1")
        await one.admin.promote("v2", PromoteBody(alias="style", percent=10, force=True), who="key_1")
        before, audited = one.projection.catalogue, len(streams.records["audit"])
        shown = await one.admin.promote(
            "v2", PromoteBody(alias="style", force=True, dry_run=True), who="key_1"
        )
        assert (shown["state"], shown["aliases"], shown["dry_run"]) == ("active", ["style"], True)
        ended = await one.admin.end_canary("style", CommentBody(dry_run=True), who="key_1")
        assert (ended["target"], ended["canary"]) == ("v1", None)
        with pytest.raises(CatalogueError):
            await one.admin.retire("v1", CommentBody(dry_run=True), who="key_1")
        with pytest.raises(NotEvaluatedError):
            await one.admin.promote("v2", PromoteBody(alias="style", dry_run=True), who="key_1")
        assert one.projection.catalogue == before and len(streams.records["audit"]) == audited


async def test_a_report_that_is_too_long_to_be_stored_is_refused_with_the_longest_that_may_be(
    tmp_path: Path,
) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        report = {"passed": True, "answers": "x" * MAX_RECORD_BYTES}
        with pytest.raises(InvalidRequest, match=f"allowed: {MAX_RECORD_BYTES}"):
            await one.admin.evaluated("v1", ReportBody(report=report), who="key_1")


async def test_two_gateways_that_change_the_registry_at_once_both_succeed_and_numbers_are_never_shared(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, gateway(streams, tmp_path / "2") as other:
        async with asyncio.TaskGroup() as tasks:
            for n in range(6):
                place = write(tmp_path, f"a{n}", n / 8)
                tasks.create_task(
                    (one if n % 2 else other).admin.add(AddBody(id=f"v{n}", location=place), who="key")
                )
        await until(
            lambda: len(one.projection.catalogue.versions) == len(other.projection.catalogue.versions) == 6
        )
        numbers = [version.engine_id for version in one.projection.catalogue.versions.values()]
        assert len(set(numbers)) == 6


async def test_a_gateway_brings_what_another_one_has_registered_when_it_is_first_needed(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, gateway(streams, tmp_path / "2") as other:
        place = write(tmp_path, "a")
        await one.admin.add(AddBody(id="v1", location=place), who="key_1")
        await until(lambda: "v1" in other.projection.catalogue.versions)
        adapter = other.projection.adapter("v1")
        assert not other.store.has(Path(adapter.path).name)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(other.source.bring(adapter))
        assert other.store.has(Path(adapter.path).name)


async def test_an_adapter_that_has_changed_at_its_source_is_rejected(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, gateway(streams, tmp_path / "2") as other:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        await until(lambda: "v1" in other.projection.catalogue.versions)
        (tmp_path / "a" / "adapter_model.safetensors").unlink()
        write(tmp_path, "b", 0.75)
        (tmp_path / "b" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(AdapterRejected) as caught:
            await other.source.bring(other.projection.adapter("v1"))
        assert caught.value.code is Rejection.WRONG_CHECKSUM


async def test_while_the_state_store_is_away_nothing_changes_and_everybody_is_served(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        await one.admin.promote("v1", FORCED, who="key_1")
        streams.down = True
        with pytest.raises(BackendUnavailable, match="the change may or may not have been made"):
            await one.admin.retire("v1", CommentBody(), who="key_1")
        assert uses(one, "v1") == "v1"


async def test_a_change_of_a_registry_that_the_store_has_lost_is_refused_at_once(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, asyncio.timeout(5):
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        streams.records[STREAM].clear()
        lost = "it has lost records; number 1 is in force here); nothing was changed"
        with pytest.raises(BackendUnavailable, match=re.escape(lost)):
            await one.admin.promote("v1", FORCED, who="key_1")


async def test_a_promotion_needs_a_passing_report_or_force_and_force_is_audited(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        with pytest.raises(NotEvaluatedError):
            await one.admin.promote("v1", PromoteBody(alias="style"), who="key_1")
        await one.admin.evaluated("v1", ReportBody(report={"passed": True}), who="key_1")
        with pytest.raises(NotEvaluatedError, match="is not signed"):
            await one.admin.promote("v1", PromoteBody(alias="style", percent=99.9), who="key_1")
        shown = await one.admin.promote(
            "v1", PromoteBody(alias="style", force=True, comment="demo"), who="key_9"
        )
        assert (shown["state"], shown["aliases"]) == ("active", ["style"])
    audited = [orjson.loads(record.data) for record in streams.records["audit"]]
    assert [(one["action"], one["result"].split(":")[0]) for one in audited] == [
        ("adapter.add", "done"),
        ("adapter.promote", "refused"),
        ("adapter.evaluated", "done"),
        ("adapter.promote", "refused"),
        ("adapter.promote.forced", "done"),
    ]
    assert (audited[-1]["who"], audited[-1]["comment"]) == ("key_9", "demo")


async def test_a_password_in_a_refused_location_is_in_no_answer_and_no_audit_record(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "one") as one:
        with pytest.raises(AdapterRejected, match="s3://…@bucket/v1' is not") as refused:
            await one.admin.add(AddBody(id="v1", location="s3://AKIA1:hunter2@bucket/v1"), who="key_1")
    (record,) = streams.records["audit"]
    assert "hunter2" not in str(refused.value) and b"hunter2" not in record.data


async def test_names_that_are_not_there_and_versions_that_are_retired_are_refused(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        with pytest.raises(NoSuchAdapter):
            await one.admin.retire("nobody", CommentBody(), who="key_1")
        with pytest.raises(NoSuchAdapter):
            await one.admin.roll_back("nobody", RollbackBody(), who="key_1")
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        await one.admin.retire("v1", CommentBody(), who="key_1")
        with pytest.raises(CatalogueError, match="is retired"):
            await one.admin.add(AddBody(id="v1", location=str(tmp_path / "nowhere")), who="key_1")
        with pytest.raises(CatalogueError, match="is retired"):
            await one.admin.preload("v1", who="key_1")
        with pytest.raises(UnknownAdapter, match="is retired"):
            uses(one, "v1")


async def test_an_alias_where_a_version_is_needed_is_called_an_alias_and_its_version_is_named(
    tmp_path: Path,
) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        await one.admin.promote("v1", PromoteBody(alias="style", force=True), who="key_1")
        for change in (
            one.admin.pin("style", True, who="key_1"),
            one.admin.preload("style", who="key_1"),
            one.admin.verify("style", who="key_1"),
            one.admin.retire("style", CommentBody(), who="key_1"),
            one.admin.promote("style", FORCED, who="key_1"),
        ):
            with pytest.raises(NoSuchAdapter, match="'style' is an alias; name its version, 'v1'"):
                await change


async def test_a_dry_run_of_an_addition_checks_all_and_keeps_nothing(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one:
        place, bad = write(tmp_path, "a"), crafted.write(tmp_path / "bad", weights=b"")
        shown = await one.admin.add(
            AddBody(id="v1", location=place, labels={"kind": "x"}, dry_run=True), who="key_1"
        )
        assert (shown["id"], shown["state"], shown["labels"], shown["dry_run"]) == (
            "v1",
            "staged",
            {"kind": "x"},
            True,
        )
        assert str(shown["at"]).startswith("2027-01-15"), "the time of the preview, as of an addition"
        cut = "adapter_model.safetensors: the file has 0 bytes; its header alone should have 8"
        with pytest.raises(AdapterRejected, match=f"^truncated: {re.escape(str(bad))}: {re.escape(cut)}$"):
            await one.admin.add(AddBody(id="v1", location=str(bad), dry_run=True), who="key_1")
        assert one.projection.catalogue.versions == {} and not one.store.has(str(shown["sha256"]))
        with pytest.raises(CatalogueError, match="id: given 'a b'"):
            await one.admin.add(AddBody(id="a b", location=place, dry_run=True), who="key_1")
        assert "audit" not in streams.records


async def test_an_adapter_that_the_routing_names_is_not_retired_even_in_a_dry_run(tmp_path: Path) -> None:
    rules = {"v1": ["routes.chat.adapter_rules[0]"]}
    async with gateway(MemoryStreams(), tmp_path / "1", routed=lambda name: rules.get(name, [])) as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key_1")
        for dry_run in (True, False):
            with pytest.raises(CatalogueError, match=r"routes\.chat\.adapter_rules\[0\] of the routing"):
                await one.admin.retire("v1", CommentBody(dry_run=dry_run), who="key_1")
        rules.clear()
        assert (await one.admin.retire("v1", CommentBody(), who="key_1"))["state"] == "retired"


class FakeBucket:
    """A fetcher that returns ``folder``, or raises ``error``."""

    def __init__(self, folder: str, error: Exception | None = None, total: int = 100) -> None:
        self.folder, self.error, self.total = folder, error, total

    def fetch(
        self,
        into: Path,
        *,
        small: bool = False,
        on_progress: OnProgress = ignore,
        stop: threading.Event | None = None,
    ) -> Path:
        on_progress(Progress(10, self.total))
        if self.error is not None:
            raise self.error
        return Path(self.folder)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_refusal_has_the_location_once_and_no_name_of_the_gateways_own_folders(
    tmp_path: Path, dry_run: bool
) -> None:
    good = Path(write(tmp_path, "a"))
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as tar:
        tar.add(good, "x/a")
        tar.add(good, "y/a")
    (tmp_path / "cut.tar").write_bytes(b"x" * 100)
    cases = [
        (good, "0" * 64, r"wrong_checksum: {}: the files' SHA-256 is [0-9a-f]{{64}}, not 0{{64}}"),
        (tmp_path / "two.tar.gz", None, r"not_found: {}: has no adapter_config\.json"),
        (tmp_path / "cut.tar", None, r"bad_archive: {}: cannot be unpacked \(ReadError\)"),
        (good / "adapter_config.json", None, r"not_found: {}: is neither a folder nor a \.tar\.gz, .*"),
    ]
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        for place, sha256, message in cases:
            given = AddBody(id="v1", location=str(place), sha256=sha256, dry_run=dry_run)
            with pytest.raises(AdapterRejected) as caught:
                await one.admin.add(given, who="key_1")
            assert re.fullmatch(message.format(re.escape(str(place))), str(caught.value)), str(caught.value)
        outside = AddBody(id="v1", location="s3://other/v1", dry_run=dry_run)
        with pytest.raises(AdapterRejected, match=r"^not_allowed: s3://other/v1: not below"):
            await one.admin.add(outside, who="key_1")


async def test_an_adapter_comes_from_s3_and_what_is_not_there_or_not_allowed_is_told_apart(
    tmp_path: Path,
) -> None:
    bucket = FakeBucket(write(tmp_path, "a"))
    async with gateway(MemoryStreams(), tmp_path / "1", fetcher=lambda prefix: bucket) as one:
        shown = await one.admin.add(AddBody(id="v1", location="s3://bucket/a"), who="key_1")
        assert shown["location"] == "s3://bucket/a"
        assert one.source.progress == {}
        bucket.error = NotThere("s3://bucket/b is empty")
        with pytest.raises(AdapterRejected) as caught:
            await one.admin.add(AddBody(id="v2", location="s3://bucket/b"), who="key_1")
        assert caught.value.code is Rejection.NOT_FOUND
        for missing in (tmp_path / "b", tmp_path / "b.tar.gz"):
            with pytest.raises(AdapterRejected, match=f"not_found: {missing}: no such f"):
                await one.admin.add(AddBody(id="v2", location=str(missing)), who="key_1")
        bucket.error = FetchError("s3://bucket/b: not allowed")
        with pytest.raises(AdapterNotHere, match="not allowed"):
            await one.admin.add(AddBody(id="v2", location="s3://bucket/b"), who="key_1")
        bucket.total = 9 << 30
        with pytest.raises(AdapterRejected, match="too_large"):
            await one.admin.add(AddBody(id="v2", location="s3://bucket/b"), who="key_1")


def content(*adapters: tuple[str, str], **aliases: str) -> RegistryContent:
    return RegistryContent(tuple(Adapter(name, 1, "tiny", place) for name, place in adapters), aliases)


async def test_the_registrys_file_is_taken_in_once_and_does_not_undo_what_operators_did(
    tmp_path: Path,
) -> None:
    streams, first, second = MemoryStreams(), write(tmp_path, "a"), write(tmp_path, "b", 0.5)
    listed = content(("v1", first), ("v2", second), style="v1")
    async with gateway(streams, tmp_path / "1") as one:
        await one.importing(listed).run()
        assert (uses(one, "v1"), uses(one, "v2"), uses(one, "style")) == ("v1", "v2", "v1")
        number = one.projection.catalogue.number
        await one.importing(listed).run()
        assert one.projection.catalogue.number == number
        await one.admin.promote("v2", PromoteBody(alias="style", force=True), who="key_1")
        await one.admin.retire("v1", CommentBody(), who="key_1")
        await one.importing(listed).run()
        assert uses(one, "style") == "v2"
        assert one.projection.catalogue.version("v1").state is AdapterState.RETIRED


async def test_a_file_that_waits_for_the_store_is_logged_once_an_adapter_and_taken_in_later(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one, asyncio.TaskGroup() as group:
        streams.down = True
        listed = replace(one.importing(content(("v1", write(tmp_path, "a")))), again_s=0.01)
        with capture_logs() as logs:
            group.create_task(listed.run())
            await asyncio.sleep(0.5)
            streams.down = False
            await until(lambda: "v1" in one.projection.catalogue.versions)
        assert [line["event"] for line in logs].count("adapter not imported yet") == 1


async def test_an_adapter_of_the_file_whose_location_is_away_at_the_start_is_taken_in_when_it_is_back(
    tmp_path: Path,
) -> None:
    bucket = FakeBucket(write(tmp_path, "a"), error=FetchError("s3://bucket/a: not reached"))
    fetched = gateway(MemoryStreams(), tmp_path / "1", fetcher=lambda prefix: bucket)
    async with fetched as one, asyncio.TaskGroup() as group:
        listed = content(("far", "s3://bucket/a"), ("v1", write(tmp_path, "b", 0.5)), style="far", house="v1")
        again = replace(one.importing(listed), again_s=0.01)
        with capture_logs() as logs:
            group.create_task(again.run())
            await until(lambda: again.tried)
            assert uses(one, "house") == "v1"  # it does not wait for the other one
            with pytest.raises(UnknownAdapter, match="not reached"):
                uses(one, "far", operator=True)
            bucket.error = None
            await until(lambda: "style" in one.registry.ids and "style" in one.registry.aliases)
        assert uses(one, "style") == "far"
        assert one.admin.show_all()["refused"] == []
        assert [line["event"] for line in logs] == ["adapter not imported yet"]


async def test_other_content_under_a_name_of_the_file_is_refused_and_the_old_one_stays(
    tmp_path: Path,
) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await one.importing(content(("v1", write(tmp_path, "a")))).run()
        before = one.projection.catalogue
        await one.importing(content(("v1", write(tmp_path, "b", 0.5)))).run()
        assert one.projection.catalogue == before and uses(one, "v1") == "v1"
        assert "versions never change" in one.registry.offered.refused["v1"]


async def test_an_invalid_adapter_of_the_file_is_refused_with_its_reason_and_the_others_are_served(
    tmp_path: Path,
) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await one.importing(content(("gone", str(tmp_path / "gone")), ("v1", write(tmp_path, "a")))).run()
        assert uses(one, "v1") == "v1"
        with pytest.raises(UnknownAdapter, match=r"was refused.*not_found"):
            uses(one, "gone", operator=True)


async def test_adapters_of_the_file_for_another_base_model_are_left_out_and_say_so(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        listed = content(("v1", write(tmp_path, "a")), style="v2")
        other = RegistryContent((*listed.adapters, Adapter("v2", 2, "huge", "nowhere")), {"style": "v2"})
        await one.importing(other).run()
        assert uses(one, "v1") == "v1"
        with pytest.raises(UnknownAdapter, match="wrong_base: for 'huge'; served here: 'tiny'"):
            uses(one, "v2", operator=True)
        assert "style" not in one.projection.catalogue.aliases


async def test_several_gateways_take_in_the_same_file_at_once(tmp_path: Path) -> None:
    streams = MemoryStreams()
    listed = content(("v1", write(tmp_path, "a")), ("v2", write(tmp_path, "b", 0.5)), style="v1")
    async with gateway(streams, tmp_path / "s") as one, gateway(streams, tmp_path / "s") as other:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.importing(listed).run())
            tasks.create_task(other.importing(listed).run())
        await until(lambda: one.projection.catalogue == other.projection.catalogue)
        assert len(one.projection.catalogue.versions) == 2


class RunningLoader:
    """Runs the loop of a gateway's LoRA loader; the block starts when the loader is warm."""

    def __init__(self, one: RegistryGateway, engine: FakeEngine, places: int) -> None:
        self.slots = one.loader.make_slots(engine, places)
        self._loader = one.loader

    async def __aenter__(self) -> RunningLoader:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._task = self._group.create_task(self._loader.run(lambda: True))
        await until(lambda: self._loader.warm)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await self._group.__aexit__(None, None, None)


async def active(one: RegistryGateway, folder: Path, *names: str) -> None:
    for index, name in enumerate(names):
        await one.admin.add(AddBody(id=name, location=write(folder, f"of-{name}", index / 16)), who="key")
        await one.admin.promote(name, FORCED, who="key")


async def test_pinned_and_demanded_adapters_are_loaded_before_the_loader_is_warm_also_after_a_restart(
    tmp_path: Path,
) -> None:
    streams, engine = MemoryStreams(), FakeEngine()
    async with gateway(streams, tmp_path / "1") as one:
        await active(one, tmp_path, "a", "b", "c", "d")
        await one.admin.pin("d", True, who="key")
        async with RunningLoader(one, engine, 2) as running:
            assert set(engine.adapters) == {"d"}
            for _ in range(3):
                async with running.slots.hold(one.projection.adapter("b")):
                    pass
    again = FakeEngine()
    async with gateway(streams, tmp_path / "1") as one, RunningLoader(one, again, 2):
        assert again.log == ["load d", "load b"]
        assert [type(event) for event in one.events] == [AdapterLoaded, AdapterLoaded]


async def test_the_loader_is_warm_in_time_though_an_adapter_is_broken_or_never_loads(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await active(one, tmp_path, "a", "b")
        await one.admin.pin("a", True, who="key")
        engine = FakeEngine(broken={"a"})
        async with RunningLoader(one, engine, 3):
            assert engine.log == ["load a"]
        engine = FakeEngine()
        engine.may_load.clear()
        one.loader.preload_timeout_s = 0.05
        async with RunningLoader(one, engine, 3):
            assert engine.adapters == {}
            engine.may_load.set()


async def test_a_pin_loads_the_adapter_and_the_last_place_is_left_to_others(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await active(one, tmp_path, "a", "b")
        engine = FakeEngine()
        async with RunningLoader(one, engine, 2):
            await one.admin.pin("a", True, who="key")
            await until(lambda: "a" in engine.adapters)
            with pytest.raises(CatalogueError, match="one place must be left"):
                await one.admin.pin("b", True, who="key")
            assert (await one.admin.pin("a", False, who="key"))["pinned"] is False


async def test_pins_of_another_base_model_s_gateways_take_no_place_of_this_one(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await active(one, tmp_path, "a")
        verified = await one.source.take(write(tmp_path, "other"))
        for event in (
            lambda book: changes.register(book, "other", verified, base_model="huge", location="other"),
            lambda book: changes.pin(book, "other", True),
        ):
            await one.projection.change(event, author="key")
        async with RunningLoader(one, FakeEngine(), 2):
            assert (await one.admin.pin("a", True, who="key"))["pinned"] is True


async def test_a_retired_version_is_unloaded_when_its_last_request_has_ended(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await active(one, tmp_path, "a")
        engine = FakeEngine()
        async with RunningLoader(one, engine, 2) as running:
            with one.registry.lease(Selection("a")) as lease:
                assert lease.adapter is not None
                async with running.slots.hold(lease.adapter):
                    await one.admin.retire("a", CommentBody(), who="key")
                    for _ in range(3):
                        one.loader.wake()
                        await asyncio.sleep(0.01)
                    assert "a" in engine.adapters
            await until(lambda: engine.adapters == {})
            assert one.events[-1] == AdapterUnloaded("a", "retired")


async def test_a_preload_by_hand_tells_why_it_failed(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await active(one, tmp_path, "a")
        with pytest.raises(BackendFailure, match="neither an engine in process"):
            await one.admin.preload("a", who="key")
        engine = FakeEngine(broken={"a"})
        async with RunningLoader(one, engine, 2):
            with pytest.raises(BackendFailure, match="adapter a cannot be loaded"):
                await one.admin.preload("a", who="key")
            engine.broken.clear()
            assert (await one.admin.preload("a", who="key"))["resident"] is True


async def test_a_version_for_another_base_model_is_registered_and_not_offered(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with gateway(streams, tmp_path / "1") as one:
        place = write(tmp_path, "a")
        verified = await one.source.take(place)
        await one.projection.change(
            lambda book: changes.register(book, "v1", verified, base_model="huge", location=place),
            author="key",
        )
        assert "v1" in one.projection.catalogue.versions and "v1" not in one.registry.ids


async def test_each_check_of_a_kept_copy_reads_it_anew(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path / "1") as one:
        await one.admin.add(AddBody(id="v1", location=write(tmp_path, "a")), who="key")
        assert (await one.admin.verify("v1", who="key")).verified
        weights = Path(one.projection.adapter("v1").path) / "adapter_model.safetensors"
        weights.chmod(0o600)
        weights.write_bytes(weights.read_bytes()[:-4] + b"\xff" * 4)
        again = f"{re.escape(str(weights.parent))}: .*; delete this folder, and it is fetched again from "
        with pytest.raises(AdapterRejected, match=again + re.escape(str(tmp_path / "a"))):
            await one.admin.verify("v1", who="key")
        os.truncate(weights, weights.stat().st_size - 4)  # no longer complete, so it is fetched again
        assert (await one.admin.verify("v1", who="key")).verified
        shutil.rmtree(weights.parent)
        assert (await one.admin.verify("v1", who="key")).verified
