"""The training script: a few steps give a folder that loads, and a stopped run can be resumed."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from evaluation.demo_eval import load_model
from models.batches import IGNORED, batches
from models.precision import Float32Muon
from models.train_demo import main, rate_factor

DEMO = Path(__file__).parents[2] / "models" / "demo"
SMALL = ["--batch-tokens", "512", "--max-tokens", "256"]


def run(folder: Path, *options: str) -> None:
    """Train a few small steps with the tokenizer that the repository ships."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    main(["--out", str(folder), "--keep-tokenizer", *SMALL, *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo``, trained for one step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder / "demo", "--steps", "1", "--seed", "3", "--checkpoint", str(folder / "state.pt"))
    return folder


def test_a_short_run_leaves_a_folder_that_loads(trained: Path) -> None:
    assert torch.load(trained / "state.pt", weights_only=True)["progress"]["step"] == 1
    model, tokenizer = load_model(trained / "demo")
    ids = tokenizer("Hello", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_the_same_seed_trains_the_same_weights(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "two", "--steps", "1", "--seed", "3")
    assert "finished: 1 steps" in capsys.readouterr().out
    weights = [(folder / "model.safetensors").read_bytes() for folder in (trained / "demo", tmp_path / "two")]
    assert weights[0] == weights[1]


def test_a_resumed_run_goes_on_from_its_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copy(trained / "state.pt", tmp_path)
    run(tmp_path / "demo", "--steps", "2", "--seed", "3", "--checkpoint", str(checkpoint), "--resume")
    assert "finished: 2 steps" in capsys.readouterr().out
    assert torch.load(checkpoint, weights_only=True)["progress"]["step"] == 2


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--resume"])
    assert "--checkpoint" in capsys.readouterr().err


def test_skipping_batches_continues_the_same_stream() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    whole = list(islice(batches(tokenizer, 1, 2048, 512), 5))
    rest = list(islice(batches(tokenizer, 1, 2048, 512, skip=3), 2))
    assert [batch.tokens for batch in rest] == [batch.tokens for batch in whole[3:]]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(rest, whole[3:], strict=True))


def test_labels_are_the_next_tokens_and_mostly_those_of_answers() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    batch = next(batches(tokenizer, 1, 4096, 512))
    padding = 0
    wanted = (batch.labels[:, :-1] != IGNORED) & (batch.inputs[:, 1:] != padding)
    assert torch.equal(batch.labels[:, :-1][wanted], batch.inputs[:, 1:][wanted])
    assert 0.1 < wanted.float().mean() < 0.6


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    factors = [rate_factor(done / 100) for done in range(101)]
    assert factors[0] < 0.05
    assert max(factors) == pytest.approx(1.0)
    assert factors.index(max(factors)) == 3
    assert factors[-1] == pytest.approx(0.02)


def test_muon_in_float32_updates_as_pytorchs_does() -> None:
    options = {"lr": 0.1, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    shapes = [(8, 24), (24, 8), (16, 16)]
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(one.clone()) for one in start] for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(2, 2))
    tuning = [Float32Muon([*ours, frozen], **options), torch.optim.Muon(theirs, **options)]
    for seed in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(seed))
            other.grad = one.grad.clone()
        for optimiser in tuning:
            optimiser.step()
    for one, other, was in zip(ours, theirs, start, strict=True):
        assert torch.allclose(one, other, atol=0.01)  # bfloat16 has eight bits of precision
        assert (one - was).abs().mean() > 0.03
    assert torch.equal(frozen, torch.ones(2, 2))
    states = [optimiser.state_dict() for optimiser in tuning]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    tuning[0].load_state_dict({**states[0], "state": states[1]["state"]})
