"""Reads Dockerfiles: enough of the syntax to test the policy and to lay out an image's files."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITABLE = ("/var/lib/sluice", "/var/cache/sluice", "/tmp")


@dataclass(frozen=True)
class Instruction:
    """One instruction, continuation lines joined."""

    word: str
    rest: str


@dataclass
class Stage:
    """A build stage: from one FROM to the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [i.rest for i in self.instructions if i.word == word]

    def last(self, word: str) -> str:
        found = self.all(word)
        assert found, f"{self.name}: no {word}"
        return found[-1]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for rest in self.all("ENV") for pair in shlex.split(rest))

    @property
    def copied(self) -> list[tuple[list[str], str]]:
        """Sources and target of each COPY from the build context."""
        found = []
        for rest in self.all("COPY"):
            words = shlex.split(rest)
            if not any(word.startswith("--from=") for word in words):
                *sources, target = [word for word in words if not word.startswith("--")]
                found.append((sources, target))
        return found


@dataclass
class Dockerfile:
    """The stages, and the ARGs before the first FROM."""

    arguments: dict[str, str]
    stages: list[Stage]

    @property
    def runtime(self) -> Stage:
        return self.stages[-1]


def read_dockerfile(path: Path) -> Dockerfile:
    lines, joined = path.read_text(encoding="utf-8").splitlines(), ""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in lines:
        if not joined and (not line.strip() or line.lstrip().startswith("#")):
            continue
        joined += line.rstrip("\\").strip() + " "
        if line.endswith("\\"):
            continue
        word, _, rest = joined.strip().partition(" ")
        joined = ""
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            for key, value in arguments.items():
                base = base.replace(f"${{{key}}}", value)
            stages.append(Stage(base, name))
        elif not stages:
            assert word == "ARG", f"{word} before the first FROM"
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            stages[-1].instructions.append(Instruction(word, rest))
    return Dockerfile(arguments, stages)


def lay_out(stage: Stage, image: Path) -> None:
    """Copies the stage's files from the build context to ``image``, which stands for ``/``."""
    for sources, target in stage.copied:
        for source in sources:
            into = image / (target if target.startswith("/") else f"{stage.last('WORKDIR')}/{target}").lstrip(
                "/"
            )
            # As in Docker, a target that ends with a slash is a folder.
            into = into / Path(source).name if target.endswith("/") else into
            into.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, into)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Modification time in ns and size in bytes of each file and folder, by path."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}
