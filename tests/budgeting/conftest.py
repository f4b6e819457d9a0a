from __future__ import annotations

from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from tests.budgeting.folders import write_all

DEMO = Path(__file__).parents[2] / "models" / "demo"
# Templates that accept a system message at any position, so every prompt of the planner can be rendered.
CHAT_KINDS = ("demo", "chatml", "headers", "counting", "unmarked")
ALL_KINDS = (*CHAT_KINDS, "alternating", "metaspace")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"demo": DEMO, **write_all(tmp_path_factory.mktemp("tokenizers"))}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session", params=CHAT_KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, ChatTokenizer]) -> ChatTokenizer:
    return tokenizers[request.param]
