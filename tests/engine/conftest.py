"""Fixtures of the engine's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.engine import Engine
from engine.values import EngineConfig
from tests.engine.support import DEMO_MODEL, write_tiny_model

MakeEngine = Callable[..., Engine]

# Two tests run at once on two cores, so a second thread would mostly wait.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["tiny", "demo"])
def model_folder(request: pytest.FixtureRequest, tiny_model: Path) -> Path:
    """The tiny random model, then the demo model of the repository."""
    return tiny_model if request.param == "tiny" else DEMO_MODEL


@pytest.fixture(scope="session")
def make_engine(tiny_model: Path) -> MakeEngine:
    """Returns a function that builds an engine in this process, by default with the tiny model."""

    def make(folder: Path = tiny_model, **options: object) -> Engine:
        settings: dict[str, object] = {"num_threads": 1, "num_blocks": 512, "seed": 0, **options}
        return build_engine(EngineConfig(model=str(folder), **settings))  # type: ignore[arg-type]

    return make
