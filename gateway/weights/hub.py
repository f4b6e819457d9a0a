"""Fetches a model of the Hugging Face hub into the hub's own cache, through huggingface_hub.

The library cannot be interrupted, so it runs in a child process, which a stop kills; what has arrived stays
in its cache and is resumed. ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are honoured.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gateway.weights.errors import (
    AccessDenied,
    CacheUnusable,
    DiskFull,
    FetchError,
    FetchStopped,
    LibraryMissing,
    NotThere,
    UnknownLocation,
    Unreachable,
)
from gateway.weights.location import HubModel, locate
from gateway.weights.selection import is_small
from gateway.weights.values import OnProgress, Progress, everything, ignore

_ERRORS: dict[str, type[FetchError]] = {
    "denied": AccessDenied,
    "full": DiskFull,
    "disk": CacheUnusable,
    "missing": NotThere,
    "unreachable": Unreachable,
}


class HubFetcher:
    """Fetches from the hub; ``into`` is not used, since the hub's cache is shared with other programs.

    Raises:
        LibraryMissing: huggingface_hub is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise LibraryMissing("a hub id needs huggingface_hub: pip install 'sluice-gateway[hub]'")

    def fetch(
        self,
        url: str,
        into: Path,
        *,
        wanted: Callable[[str], bool] = everything,
        on_progress: OnProgress = ignore,
        stop: threading.Event | None = None,
    ) -> Path:
        """Fetch all files of the model, or the small ones; the returned folder is one commit's snapshot."""
        location = locate(url)
        if not isinstance(location, HubModel):
            raise UnknownLocation(f"{url!r} is not hf://org/name")
        asked = {"repo": location.repo, "revision": location.revision, "small": wanted is is_small}
        command = [sys.executable, "-m", "gateway.weights.hub_child", json.dumps(asked)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        ) as child:
            try:
                return self._follow(child, location, on_progress, stop)
            finally:
                child.kill()

    @staticmethod
    def _follow(
        child: subprocess.Popen[str],
        location: HubModel,
        on_progress: OnProgress,
        stop: threading.Event | None,
    ) -> Path:
        """Read what the child tells, a JSON object a line and several a second, until it ends."""
        assert child.stdout is not None
        for line in child.stdout:
            if stop is not None and stop.is_set():
                raise FetchStopped(f"{location.repo}: fetching was stopped; what has arrived is kept")
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "path" in told:
                return Path(told["path"])
            if "error" in told:
                raise _ERRORS[told["error"]](f"{location.repo}: {told['message']}")
            on_progress(Progress(told["done"], told["total"]))
        raise Unreachable(f"{location.repo}: the hub's library ended without an answer; start again")
