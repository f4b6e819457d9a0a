"""The memory allocated at the start moves into pages of 2 MiB, if the kernel can."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.server import use_huge_pages

# Makes small objects, as a start does; prints the memory in huge pages and in all, before and after the move.
SCRIPT = """
import re
from pathlib import Path
from gateway.server import use_huge_pages

objects = [(number, str(number)) for number in range(300_000)]

def kib(name):
    return int(re.search(name + r": +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1])

before = kib("AnonHugePages"), kib("Rss")
use_huge_pages()
assert objects[77] == (77, "77") and sum(number for number, _ in objects) == 44_999_850_000
print(*before, kib("AnonHugePages"), kib("Rss"))
"""


def test_what_the_start_has_left_moves_into_huge_pages_and_takes_no_more_memory() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    huge_before, rss_before, huge, rss = map(int, done.stdout.split())
    if huge == 0:
        pytest.skip("this kernel moves no memory on demand: it is older than 6.1, or has no free huge page")
    assert huge - huge_before > 20_000
    assert rss - rss_before < 8_000


def test_a_system_that_does_not_tell_its_memory_is_left_alone(tmp_path: Path) -> None:
    use_huge_pages(tmp_path / "none")
