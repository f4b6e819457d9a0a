"""An adapter from a bucket: the real fetcher with a local S3 server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from adapters.errors import AdapterRejected, Rejection
from gateway.admin.adapters import AddBody
from gateway.config.engine import WeightsSection
from gateway.state.memory import MemoryStreams
from gateway.weights.location import S3Prefix
from gateway.weights.s3 import S3Fetcher
from gateway.weights.values import Fetcher
from tests.adapters import crafted
from tests.adapters.registry_gateway import gateway

BUCKET = "adapters"


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def section(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> WeightsSection:
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    return WeightsSection(endpoint_url=s3_url, region="us-east-1")


def put(s3_url: str, folder: Path, prefix: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1")
    for file in folder.iterdir():
        client.upload_file(str(file), BUCKET, f"{prefix}/{file.name}")


async def test_a_version_comes_from_a_bucket_and_a_second_gateway_brings_it_by_itself(
    section: WeightsSection, s3_url: str, tmp_path: Path
) -> None:
    put(s3_url, crafted.write(tmp_path / "a"), "team/a")
    put(s3_url, crafted.write(tmp_path / "b", weights=b"\x08\x00"), "team/b")
    streams = MemoryStreams()

    def fetcher(prefix: S3Prefix) -> Fetcher:
        return S3Fetcher(prefix, section)

    async with gateway(streams, tmp_path / "1", fetcher=fetcher) as one:
        added = await one.admin.add(AddBody(id="a", location=f"s3://{BUCKET}/team/a"), who="key_1")
        assert added["state"] == "staged"
        with pytest.raises(AdapterRejected) as caught:
            await one.admin.add(AddBody(id="b", location=f"s3://{BUCKET}/team/b"), who="key_1")
        assert caught.value.code is Rejection.TRUNCATED
        with pytest.raises(AdapterRejected) as caught:
            await one.admin.add(AddBody(id="c", location=f"s3://{BUCKET}/team/c"), who="key_1")
        assert caught.value.code is Rejection.NOT_FOUND
    async with gateway(streams, tmp_path / "2", fetcher=fetcher) as other:
        await other.source.bring(other.projection.adapter("a"))
        assert other.store.has(str(added["sha256"]))


async def test_a_bucket_or_prefix_that_the_configuration_does_not_name_is_not_asked(tmp_path: Path) -> None:
    async with gateway(MemoryStreams(), tmp_path, s3_prefixes=["s3://adapters/team"]) as one:
        for location in (
            "s3://elsewhere/team/a", "s3://adapters", "s3://adapters/teams/a", "s3://adapters/team/../other/a",
        ):  # fmt: skip
            for dry_run in (False, True):
                with pytest.raises(AdapterRejected, match=r"allowed: s3://adapters/team$") as caught:
                    await one.admin.add(AddBody(id="a", location=location, dry_run=dry_run), who="key_1")
                assert caught.value.code is Rejection.NOT_ALLOWED
    async with gateway(MemoryStreams(), tmp_path / "2", s3_prefixes=()) as one:
        with pytest.raises(AdapterRejected, match=r"allowed: none$"):
            await one.admin.add(AddBody(id="a", location="s3://adapters/team/a"), who="key_1")
