"""The backend's section of the configuration."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.backends.bedrock.backend import FEATURES
from gateway.config.backends import BedrockSection
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.contracts.features import Feature
from gateway.wiring.bedrock import make_bedrock
from tests.bedrock.conftest import HAIKU, MakeBackend

PLAIN = {"kind": "bedrock", "model_id": HAIKU, "region": "us-east-1"}


def load(folder: Path, **changes: Any) -> Any:
    file = folder / "sluice.yaml"
    file.write_text(yaml.safe_dump({"backends": {"bedrock": {**PLAIN, **changes}}}))
    return load_settings(file, {}).backends["bedrock"]


def test_the_model_and_the_region_are_enough(tmp_path: Path) -> None:
    section = load(tmp_path)
    assert isinstance(section, BedrockSection)
    assert (section.endpoint_url, section.regions, section.cache_points) == (None, [], "auto")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"region": None}, ["backends.bedrock", "region"]),
        ({"region": "US East"}, ["region", "US East"]),
        ({"regions": ["eu-west-1", "us-east-1"]}, ["regions", "named twice"]),
        ({"model_id": "not a model"}, ["model_id", "not a model"]),
        ({"guardrail": {"id": "abc", "version": "latest"}}, ["guardrail.version", "latest"]),
        ({"max_concurrency": 0}, ["max_concurrency"]),
        ({"modelid": HAIKU}, ["modelid", "model_id"]),
        ({"cache_points": "sometimes"}, ["cache_points", "sometimes"]),
    ],
)
def test_a_wrong_key_is_told_with_what_was_given(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    for part in expected:
        assert part in str(caught.value)


def test_the_features_key_sets_what_the_backend_declares(make: MakeBackend) -> None:
    assert make().features == FEATURES
    assert make(features=["temperature", "seed"]).features == {Feature.TEMPERATURE}


def test_without_boto3_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice-gateway\[bedrock\]'"):
        make_bedrock("bedrock", BedrockSection.model_validate(PLAIN), clock=time.monotonic)
