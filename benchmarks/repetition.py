"""How often ordinary text repeats itself: the limits of ``resilience.degenerate`` must be above that.

``python -m benchmarks.repetition [FOLDER …]`` reads the Python files, Markdown and plain texts in the folders
(default: Python's library and the project's pages) with the demo model's tokenizer. It prints the longest run
of one token, the longest repeated cycle, and how many files the limits would have cut.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from budgeting.counting import ChatTokenizer
from resilience.degenerate import DegenerateLimits, Detector

ROOT = Path(__file__).resolve().parents[1]
ENDINGS = frozenset({".py", ".md", ".txt"})
# About how many files of one folder are read, so that no folder outweighs the others.
MOST_FILES = 400


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "demo")
    asked = parser.parse_args()
    folders = asked.folders or [Path(sysconfig.get_path("stdlib")), ROOT / "docs"]
    tokenizer, limits = ChatTokenizer(asked.tokenizer), DegenerateLimits()
    files = tokens = chars = cut = 0
    one: tuple[int, str] = (0, "")
    cycle: tuple[int, str] = (0, "")
    took_s = 0.0
    for path, text in texts(folders):
        ids = tokenizer.encode(text)
        files, tokens, chars = files + 1, tokens + len(ids), chars + len(text)
        one = max(one, (longest(ids, [1]), path.name))
        cycle = max(cycle, (longest(ids, range(2, limits.cycle_length + 1)), path.name))
        begun = time.perf_counter()
        cut += is_cut(ids, limits)
        took_s += time.perf_counter() - begun
    print(f"{files} files, {chars:,} characters, {tokens:,} tokens")
    print(f"longest run of one token: {one[0]} ({one[1]}); limit {limits.repeat_tokens}")
    length = limits.cycle_length
    print(f"longest cycle of 2 to {length}: {cycle[0]} ({cycle[1]}); limit {limits.cycle_tokens}")
    print(
        f"files that would have been cut: {cut}; a look costs {took_s / max(1, tokens) * 1e9:.0f} ns a token"
    )


def texts(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the text files in the folders, with their contents."""
    for folder in folders:
        found = sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file())
        for path in found[:: max(1, len(found) // MOST_FILES)]:
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                print(f"passed over, not UTF-8: {path}")


def longest(ids: tuple[int, ...], periods: Iterable[int]) -> int:
    """Length of the longest stretch that repeats a cycle of one of these lengths."""
    best = 0
    for period in periods:
        run = 0
        for before, token in zip(ids, ids[period:], strict=False):
            run = run + 1 if token == before else 0
            best = max(best, run and run + period)
    return best


def is_cut(ids: tuple[int, ...], limits: DegenerateLimits) -> bool:
    """Return whether an answer with this text, in pieces of sixteen tokens, would have been cut."""
    detector = Detector(limits)
    pieces = (ids[at : at + 16] for at in range(0, len(ids), 16))
    return any(detector.take("", len(piece), piece) for piece in pieces)


if __name__ == "__main__":
    main()
