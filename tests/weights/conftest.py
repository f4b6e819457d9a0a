"""Fixtures: a server that speaks S3, a network in front of it, and credentials in the environment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gateway.config.engine import WeightsSection
from gateway.weights.location import S3Prefix
from gateway.weights.s3 import S3Fetcher
from tests.weights.network_proxy import Proxy, proxy

BUCKET = "models"
LLAMA = S3Prefix(BUCKET, "llama")


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set test credentials and hide those of this machine."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3(s3_url: str, credentials: None) -> Iterator[Any]:
    """A client with an empty bucket."""
    client = boto3.client("s3", endpoint_url=s3_url)
    client.create_bucket(Bucket=BUCKET)
    yield client
    for one in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=one["Key"])
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture
def network(s3_url: str) -> Iterator[Proxy]:
    with proxy(s3_url) as between:
        yield between


@pytest.fixture
def fetcher_at(credentials: None) -> Callable[..., S3Fetcher]:
    """A function that makes fetchers with short timeouts."""

    def make(url: str, prefix: S3Prefix = LLAMA, connections: int = 4, **more: Any) -> S3Fetcher:
        options = WeightsSection(
            endpoint_url=url, connections=connections, connect_timeout_seconds=2, read_timeout_seconds=5
        )
        return S3Fetcher(prefix, options, backoff_s=0.01, **more)

    return make
