"""`make gpu-check`: its dry form runs its parts on a machine without a GPU, and says what was not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Part, Result, main, parts, run, table

ROOT = Path(__file__).parents[2]


def test_the_dry_form_runs_what_needs_no_gpu_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--dry", "--json"])
    found = {part["name"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert status == 0, found
    kernels, decode, equality, cuda, *rest = found.values()
    assert kernels["status"] == decode["status"] == "passed"
    assert "4 of 4 answers" in kernels["detail"]
    for words in ("1 streams graphs", "3 streams eager", "of the bandwidth limit"):
        assert words in decode["detail"]
    assert equality["status"] == cuda["status"] == "passed"
    assert "2 of 2 answers" in equality["detail"] and "skipped" in cuda["detail"]
    conformance, serve = rest
    assert (conformance["status"], conformance["detail"]) == ("not run", "left out of the dry form")
    assert serve["status"] == "passed" and "embedded on 0 GPUs: 200" in serve["detail"], serve


def test_the_kernels_and_the_decode_steps_need_pytorch_alone(tmp_path: Path) -> None:
    """Hides the packages that only text and grammars need."""
    hide = (
        "import importlib.util as u, runpy, sys\n"
        "hidden, find = {'tokenizers', 'safetensors', 'llguidance', 'transformers', 'msgspec', 'typer'}, u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name in hidden else find(name, package)\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in hidden: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "for part in (['kernels'], ['decode', '1']):\n"
        "    sys.argv = ['gpu_parts', '--tiny', *part]\n"
        "    runpy.run_module('benchmarks.gpu_parts', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(without tokenizers, safetensors, llguidance)") == 2, done.stdout


def test_all_parts_together_have_ten_minutes_and_each_its_own_limit() -> None:
    assert gpu_check.TOTAL_S == 600.0
    assert all(part.limit_s < gpu_check.TOTAL_S for part in parts(dry=False))


def test_a_part_fails_by_its_status_or_its_time_and_is_not_run_without_its_packages() -> None:
    broken = Part("broken", ("-c", "import sys; sys.exit('2 of 6 answers differ')"), 60.0)
    assert run(broken, 60.0, dry=False).status == "failed"
    assert "2 of 6 answers differ" in run(broken, 60.0, dry=False).detail
    slow = Part("slow", ("-c", "import time; time.sleep(60)"), 16.0)
    assert run(slow, 1.0, dry=False, least_s=1.0).detail == "not finished within 1 s"
    assert run(slow, gpu_check.LEAST_S - 1.0, dry=False) == Result("slow", "not run", "no time left", 0.0)
    needs = Part("needs", ("-c", ""), 60.0, needs=("torch", "a_package_that_is_not_there"))
    assert run(needs, 60.0, dry=False).detail == "needs a_package_that_is_not_there"


def test_the_table_has_a_row_for_each_part() -> None:
    shown = table([Result("a", "passed", "fine", 1.2), Result("b", "not run", "needs vllm", 0.0)], "H100")
    assert (
        "on H100" in shown
        and "| a | passed | fine | 1 s |" in shown
        and "| b | not run | needs vllm | 0 s |" in shown
    )


def test_without_a_gpu_the_real_check_is_refused_and_the_dry_form_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="ARGS=--dry"):
        main([])
