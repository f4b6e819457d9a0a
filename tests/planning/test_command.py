"""`sluice doctor --plan`, and the document that holds its tables."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.config.settings import load_settings
from ops.cli.plan import make_plans, rows
from ops.planning.options import PlanOptions
from ops.planning.shape import PlanError
from tests import fork_server
from tests.integration.live import environment

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "deploy" / "engine-tuning.md"


def run(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops.cli", *words]
    return fork_server.run(command, cwd=ROOT, env=environment(env or {}), timeout=60)


def test_the_table_shows_every_known_gpu_and_loads_no_engine() -> None:
    done = run("doctor", "--plan", "--model", "llama-3-8b-awq", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for shown in (
        "A10G",
        "A100-40GB",
        "A100-80GB",
        "H100-80GB",
        "128 KiB",
        "recommended max_num_seqs",
        "estimate",
    ):
        assert shown in done.stdout


def test_json_is_for_machines() -> None:
    words = (
        "doctor",
        "--plan",
        "--model",
        "llama-3-8b-awq",
        "--gpu",
        "A10G",
        "--gpu-memory-gib",
        "24",
        "--json",
    )
    done = run(*words, env={"SLUICE_ENGINE__MAX_LORAS": "0"})
    [plan] = json.loads(done.stdout)
    assert plan["token_bytes"] == 131_072 and plan["request"]["gpu"]["memory_bytes"] == 24 << 30
    assert plan["workspace_bytes"] + plan["kv_bytes"] + plan["weights_bytes"] == plan["budget_bytes"]


def test_the_configuration_is_what_is_planned() -> None:
    environ = {
        "SLUICE_ENGINE__KIND": "vllm",
        "TENSOR_PARALLEL_SIZE": "2",
        "MAX_NUM_SEQS": "40",
        "GPU_MEMORY_UTILIZATION": "0.8",
        "ENFORCE_EAGER": "true",
        "SLUICE_ENGINE__MAX_LORA_RANK": "20",
        "SLUICE_ADAPTERS__FILE": "adapters.yaml",
    }
    [plan] = make_plans(load_settings(None, environ), PlanOptions(model="llama-3.1-8b", gpu=["h100"]))
    asked = plan.request
    assert (asked.tensor_parallel, asked.max_num_seqs, asked.utilization) == (2, 40, 0.8)
    assert (asked.max_loras, asked.max_lora_rank, asked.cuda_graphs) == (8, 32, False)
    assert plan.weights_bytes < 9 << 30


def test_adapters_take_room_only_when_they_may_come() -> None:
    options = PlanOptions(model="llama-3-8b-awq", gpu=["A10G"])
    [without] = make_plans(load_settings(None, {}), options)
    [with_them] = make_plans(load_settings(None, {"SLUICE_ENGINE__MAX_LORAS": "4"}), options)
    assert without.lora_bytes == 0 < with_them.lora_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "TPU"], "GPU 'TPU' is not known"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--prompt-tokens", "9000"], "max_model_len"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], message: str) -> None:
    done = run("doctor", "--plan", "--model", "llama-3-8b-awq", *words)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_demo_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [plan] = make_plans(load_settings(None, {}), PlanOptions(model="models/demo", gpu=["A10G"]))
    assert plan.request.model.name == "demo"


def test_an_unknown_gpu_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="A10G"):
        make_plans(load_settings(None, {}), PlanOptions(gpu=["V100"]))


def tables() -> list[tuple[str, str]]:
    """Return each command of the document that prints a table, and the table after it."""
    found = re.findall(
        r"```sh\n([^\n]*doctor --plan[^\n]*)\n```\n\n((?:\|[^\n]*\n)+)", DOCUMENT.read_text(encoding="utf-8")
    )
    return [(command, table.strip()) for command, table in found]


def test_the_tables_of_the_tuning_guide_are_what_its_commands_compute() -> None:
    assert len(tables()) >= 3
    for command, table in tables():
        words = shlex.split(command)
        env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        rest = words[len(env) :]
        assert rest[:4] == ["sluice", "doctor", "--plan", "--model"]
        shared = int(rest[rest.index("--shared-prefix-tokens") + 1]) if len(rest) > 5 else 0
        plans = make_plans(load_settings(None, env), PlanOptions(model=rest[4], shared_prefix_tokens=shared))
        head = (plans[0].request.model.name, *(plan.request.gpu.name for plan in plans))
        lines = [head, ("---", *("---:" for _ in plans)), *rows(plans)]
        assert "\n".join(f"| {' | '.join(line)} |" for line in lines) == table, command


def test_the_tuning_guide_names_keys_and_metrics_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for key in set(re.findall(r"`(engine\.[a-z_]+)`", text)):
        assert f"| `{key}` |" in configuration, key
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "observability").glob("*.py"))
    for metric in set(re.findall(r"`((?:sluice_|vllm:)[a-z_]+?)(?:_total|_bucket)?`", text)):
        assert metric in sources, metric
