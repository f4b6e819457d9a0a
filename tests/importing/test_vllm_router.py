"""The arguments of vLLM's router and the values of its production stack become a configuration."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli.main import app
from ops.importing.values import ImportOutcome, UnreadableSource
from ops.importing.vllm_router import read_arguments, read_values
from ops.importing.writer import MAX_MODEL_LEN, configurations

ROOT = Path(__file__).parents[2]
VALUES = """
servingEngineSpec:
  vllmApiKey: vllm-do-not-copy
  modelSpec:
    - {name: llama3, modelURL: meta-llama/Llama-3.1-8B-Instruct, replicaCount: 2, requestGPU: 1, vllmConfig: {maxModelLen: 16384, maxNumSeqs: 64}}
    - {name: qwen, modelURL: Qwen/Qwen3-8B, replicaCount: 1, keda: {enabled: true}, vllmConfig: {maxNumSeqs: 64}}
routerSpec: {replicaCount: 1, routingLogic: session, sessionKey: x-user-id, extraArgs: [--log-stats]}
sharedStorage: {enabled: true}
"""


def test_static_workers_become_a_pool_for_each_model_with_its_aliases() -> None:
    words = (
        "--host 0.0.0.0 --port=8801 --service-discovery static --routing-logic roundrobin "
        "--static-backends http://a:8000,http://b:8000/,http://c:8000 --static-models llama,llama,org/qwen "
        "--static-aliases gpt-4:llama,x:gone --session-key x-user-id --sentry-dsn d --engine-stats-interval 10"
    )
    setup = read_arguments(words.split())
    settings, routing = configurations(setup)
    assert settings["backends"]["llama"]["base_urls"] == ["http://a:8000/v1", "http://b:8000/v1"]
    assert settings["backends"]["org-qwen"] == {
        "kind": "openai", "base_urls": ["http://c:8000/v1"], "model": "org/qwen", "affinity": False
    }  # fmt: skip
    assert routing["routes"]["llama"]["models"] == ["llama", "gpt-4"]
    assert routing["routes"]["org-qwen"]["models"] == ["org/qwen"]
    assert settings["server"] == {"host": "0.0.0.0", "port": 8801}
    said = {note.place: note.outcome for note in setup.notes}
    assert (
        said["--session-key"] is ImportOutcome.DIFFERENT and said["--sentry-dsn"] is ImportOutcome.UNSUPPORTED
    )
    assert said["--static-aliases"] is ImportOutcome.UNSUPPORTED and said["--port"] is ImportOutcome.CARRIED


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--routing-logic session", "--static-backends names 0"),
        ("--static-backends http://a,http://b --static-models m", "--static-models 1"),
        ("--static-backends ftp://a --static-models m", "'ftp://a'"),
        ("--static-backends http://a:99999 --static-models m", "'http://a:99999'"),
        ("serve", "'serve'"),
    ],
)
def test_arguments_that_name_no_workers_are_an_error(words: str, named: str) -> None:
    with pytest.raises(UnreadableSource, match=re.escape(named)):
        read_arguments(words.split())


def test_the_stacks_models_are_at_their_services(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(VALUES)
    setup = read_values(tmp_path / "values.yaml", "prod")
    settings, routing = configurations(setup)
    llama = settings["backends"]["meta-llama-Llama-3.1-8B-Instruct"]
    assert llama["base_urls"] == ["http://prod-llama3-engine-service:80/v1"]
    assert llama["api_key_env"] == "VLLM_API_KEY"
    assert llama["max_running"] == 128, "64 in each of two pods"
    assert "max_running" not in settings["backends"]["Qwen-Qwen3-8B"], "KEDA changes the number of pods"
    assert settings["engine"]["max_model_len"] == MAX_MODEL_LEN and len(routing["routes"]) == 2
    assert "do-not-copy" not in json.dumps(settings) + repr(setup.notes)
    places = {note.place for note in setup.notes}
    assert {"routerSpec (routing-logic)", "routerSpec (session-key)", "routerSpec.replicaCount"} <= places
    assert {"routerSpec.extraArgs", "sharedStorage", "servingEngineSpec.vllmApiKey"} <= places


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("[--served-model-name, llama, gpt-4o, --seed, '1']", ["llama", "gpt-4o"]),
        ("[--seed, '1', --served-model-name=llama]", ["llama"]),
        ("[--seed, '1']", ["org/model"]),
    ],
)
def test_a_model_of_the_stack_has_the_names_that_its_engines_serve(
    tmp_path: Path, words: str, names: list[str]
) -> None:
    spec = f"{{name: m, modelURL: org/model, requestGPU: 1, vllmConfig: {{extraArgs: {words}}}}}"
    (tmp_path / "values.yaml").write_text(f"servingEngineSpec: {{modelSpec: [{spec}]}}\n")
    setup = read_values(tmp_path / "values.yaml", "vllm")
    settings, routing = configurations(setup)
    (backend,) = settings["backends"].values()
    (route,) = routing["routes"].values()
    assert backend["model"] == names[0] and route["models"] == names
    assert any("requestGPU, vllmConfig: of the engines" in note.text for note in setup.notes)


@pytest.mark.parametrize(
    "text", ["[]", "servingEngineSpec: {}", "servingEngineSpec: {modelSpec: [{name: a}]}"]
)
def test_values_without_models_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "values.yaml").write_text(text)
    with pytest.raises(UnreadableSource, match="modelSpec"):
        read_values(tmp_path / "values.yaml", "vllm")


@pytest.mark.parametrize(
    ("more", "place"),
    [("vllmConfig: none}]}", "modelSpec[0]"), ("tag: 1}]}\nrouterSpec: [1]", "routerSpec")],
)
def test_a_value_of_another_type_is_named_by_its_place(tmp_path: Path, more: str, place: str) -> None:
    (tmp_path / "values.yaml").write_text(
        "servingEngineSpec: {modelSpec: [{name: a, modelURL: b, " + more + "\n"
    )
    with pytest.raises(UnreadableSource, match=re.escape(f"{place}: a value of another type")):
        read_values(tmp_path / "values.yaml", "vllm")


def test_the_documented_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/importing.md").read_text(encoding="utf-8")
    commands = re.findall(r"^sluice (import .+)$", text, re.M)
    assert [command.split()[1] for command in commands] == ["litellm", "vllm-router", "production-stack"]
    for number, command in enumerate(commands):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "values.yaml").write_text(VALUES)
        shutil.copy(ROOT / "tests/importing/litellm.yaml", folder / "config.yaml")
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.output
        assert (folder / "sluice.yaml").is_file() and (folder / "routing.yaml").is_file()
