"""The GPUs' figures for deep health, from ``nvidia-smi``."""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence

# The tool takes about 50 ms on an idle machine, and seconds if the driver is busy.
TIMEOUT_S = 5.0
FIELDS = "index,utilization.gpu,memory.used,memory.total"
MIB_PER_GB = 1024


async def read_gpus(tool: str = "nvidia-smi") -> Sequence[Mapping[str, float | None]]:
    """Return each GPU's index, use in percent, and used and total memory in GB (2^30 bytes).

    Empty on a machine without NVIDIA's driver, and if its tool does not answer within :data:`TIMEOUT_S`.
    """
    path = shutil.which(tool)
    if path is None:
        return ()
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            f"--query-gpu={FIELDS}",
            "--format=csv,noheader,nounits",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ()  # that the tool cannot be run is no sign of bad health
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return ()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return parse(output.decode(errors="replace"))


def parse(output: str) -> Sequence[Mapping[str, float | None]]:
    """Parse the tool's lines; unknown figures (``[N/A]``) are ``None``."""
    found = []
    for line in output.splitlines():
        figures = [_number(text) for text in line.split(",")]
        if len(figures) != FIELDS.count(",") + 1:
            continue
        index, use, *memory = figures
        used, total = (None if mib is None else round(mib / MIB_PER_GB, 2) for mib in memory)
        found.append(
            {"index": index, "utilization_pct": use, "memory_used_gb": used, "memory_total_gb": total}
        )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
