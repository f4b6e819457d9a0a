"""Scenario files, and which faults are due at which time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.errors import ChaosError
from ops.chaos.processes import engine_pids
from ops.chaos.scenario import NEVER, FaultAction, RandomFaults, Scenario, load_scenario
from ops.chaos.timeline import Timeline

SHIPPED = sorted((Path(__file__).parents[2] / "ops" / "chaos" / "scenarios").glob("*.yaml"))
KILL: dict[str, Any] = {"kill": "engine"}


def scenario(**keys: Any) -> Scenario:
    return Scenario.model_validate({"about": "a test", **keys})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_is_one_and_forbids_losing_requests(path: Path) -> None:
    shipped = load_scenario(path)
    assert not NEVER & set(shipped.allow)
    assert shipped.faults or shipped.random


def test_a_shipped_scenario_is_found_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_scenario(Path("engine-kill")) == load_scenario(SHIPPED[0].with_name("engine-kill.yaml"))
    with pytest.raises(ChaosError, match=r"no such file; bundled: .*engine-kill, engine-stop"):
        load_scenario(Path("no-such-scenario"))


def test_there_is_a_scenario_for_everything_that_is_promised() -> None:
    assert {path.stem for path in SHIPPED} == {
        "engine-kill", "engine-stop", "worker-kill", "bedrock-throttle", "bedrock-hang", "bedrock-cut",
        "both-down", "nan", "oom", "soak", "vllm-kill", "vllm-kill-alone", "vllm-stop",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"faults": [{"at_s": 1, "after_tokens": 2, "do": KILL}]}, "at_s or after_tokens"),
        ({"faults": [{"at_s": 1, "do": {"kill": "engine", "stop": "engine"}}]}, "only one"),
        ({"faults": [{"at_s": 1, "do": {"kill": "everything"}}]}, "faults\\[0\\].do.kill"),
        ({"load": {"streams": 0, "whole": 0}}, "at least one request"),
        ({"lod": {}}, "lod"),
        ({"faults": [{"at_s": 1, "do": {"inject": [{"backend": "local", "kind": "boom"}]}}]}, "boom"),
    ],
)
def test_a_wrong_file_is_told_by_its_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump({"about": "a test", **keys}))
    with pytest.raises(ChaosError, match=message):
        load_scenario(path)


def test_a_file_that_is_not_there_or_no_yaml_is_told(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="cannot be read"):
        load_scenario(tmp_path / "gone.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ChaosError, match="not valid YAML"):
        load_scenario(tmp_path / "bad.yaml")


def test_faults_come_at_their_time_or_with_their_token_and_once() -> None:
    timeline = Timeline(
        scenario(
            faults=[
                {"at_s": 2.0, "do": {"cont": "engine"}},
                {"at_s": 1.0, "do": {"stop": "engine"}},
                {"after_tokens": 10, "do": KILL},
            ]
        ).faults
    )
    assert timeline.next_s == 1.0
    assert timeline.due(0.5, 9.9) == []
    assert [action.label for action in timeline.left] == ["stop engine", "cont engine", "kill engine"]
    assert [action.label for action in timeline.due(1.5, 10.0)] == ["stop engine", "kill engine"]
    assert not timeline.over
    assert [action.label for action in timeline.due(9.0, 99.0)] == ["cont engine"]
    assert timeline.over and timeline.next_s == math.inf and timeline.left == []


@given(seed=st.integers(0, 1000), steps=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=60))
def test_random_faults_are_the_same_for_a_seed_and_each_is_mended_before_the_next(
    seed: int, steps: list[float]
) -> None:
    chance = RandomFaults.model_validate(
        {
            "seed": seed,
            "every_s": [1, 4],
            "choices": [
                {"do": {"stop": "worker:1"}, "then": {"cont": "worker:1"}, "for_s": 2},
                {"do": {"bedrock": {"status": 429}}, "then": {"bedrock": {}}, "for_s": 1},
            ],
        }
    )

    def run() -> list[str]:
        timeline, now_s, done = Timeline((), chance), 0.0, list[FaultAction]()
        for step in steps:
            now_s += step
            done += timeline.due(now_s, 0.0)
        done += timeline.end()
        return [action.label for action in done]

    applied = run()
    assert applied == run()
    pairs = {"stop worker:1": "cont worker:1", "bedrock 429": "bedrock well"}
    assert [pairs[one] for one in applied[::2]] == applied[1::2]


def test_a_gateway_that_has_ended_has_no_engine() -> None:
    with pytest.raises(ChaosError, match="no engine process"):
        engine_pids(4_194_305)  # above the largest process id
