"""Fixtures: the stand-in for Bedrock, and backends that call it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.bedrock.stand_in import StandIn, stand_in
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.config.backends import BedrockSection
from gateway.wiring.bedrock import make_bedrock

HAIKU = "anthropic.claude-3-haiku-20240307-v1:0"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_numbers = itertools.count()
MakeBackend = Callable[..., BedrockBackend]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set AWS credentials in the environment, and remove the machine's own AWS variables."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bedrock() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


@pytest.fixture
def make(bedrock: StandIn) -> Iterator[MakeBackend]:
    made: list[BedrockBackend] = []

    def make_one(**changes: Any) -> BedrockBackend:
        section = BedrockSection.model_validate(
            {
                "kind": "bedrock",
                "model_id": HAIKU,
                "region": "us-east-1",
                "endpoint_url": bedrock.url,
                **changes,
            }
        )
        made.append(make_bedrock(f"bedrock{next(_numbers)}", section, clock=time.monotonic))
        return made[-1]

    yield make_one
    for backend in made:
        backend.stop()
