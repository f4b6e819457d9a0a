"""The child process of :mod:`gateway.weights.hub`: runs huggingface_hub and tells how it goes.

Takes one argument, a JSON object ``{"repo", "revision", "small"}``; prints a JSON object a line:
``{"done", "total"}`` twice a second, at the end ``{"path"}`` or ``{"error", "message"}``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from typing import Any

from gateway.weights.selection import is_small, needed, unneeded_patterns

TICK_S = 0.5
HUB_TIMEOUT_S = 10.0


def main() -> None:
    """Fetch and tell."""
    asked = json.loads(sys.argv[1])
    # The bars' own thread would write to a terminal that is not there; bytes are counted below.
    from huggingface_hub.utils.tqdm import tqdm

    counters: list[Any] = []

    class Counter(tqdm):
        """A progress bar that nobody sees."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options.update(disable=False, file=sink)
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]
            if self.unit == "B":
                counters.append(self)

    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_S):
            done = max((int(counter.n) for counter in counters), default=0)
            total = max((int(counter.total or 0) for counter in counters), default=0)
            _tell(done=done, total=total)

    with open(os.devnull, "w", encoding="utf-8") as sink:
        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            answer = {"path": _fetch(asked["repo"], asked["revision"], asked["small"], Counter)}
        except Exception as error:  # the library raises its own, its HTTP client's and the file system's
            kind, message = _meaning(error)
            answer = {"error": kind, "message": message}
        over.set()
        ticker.join()
        _tell(**answer)


def _fetch(repo: str, revision: str | None, small: bool, counter: Any) -> str:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        raise
    except Exception as error:  # its HTTP client's, or that it is told to stay offline
        try:
            return huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                local_files_only=True,
                ignore_patterns=unneeded_patterns(small=small),
            )
        except LocalEntryNotFoundError:
            raise error from None
    names = needed([file.rfilename for file in info.siblings or ()])
    chosen = [name for name in names if is_small(name)] if small else list(names)
    return huggingface_hub.snapshot_download(
        repo, revision=revision, allow_patterns=[_literally(name) for name in chosen], tqdm_class=counter
    )


def _literally(name: str) -> str:
    """A pattern that matches this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _meaning(error: Exception) -> tuple[str, str]:
    import huggingface_hub.errors as hub

    if isinstance(error, hub.GatedRepoError):
        return "denied", "the model is gated; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, hub.RepositoryNotFoundError):
        return "missing", (
            "there is no such folder here, and no such model on the hub that HF_TOKEN may read"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return "missing", "the hub's model has no such revision; check what stands after @ in engine.model"
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return "unreachable", (
            "not in the hub's cache (HF_HOME), and the hub is not reached or HF_HUB_OFFLINE is set; fetch it "
            "once with the network, or give engine.model a folder or s3:// prefix"
        )
    if isinstance(error, hub.HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        if status in (401, 403):
            return "denied", f"the hub says {status}; set HF_TOKEN to a token that may read the model"
        return "unreachable", f"the hub says {status}; try again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full", "the disk of HF_HOME is full; free some space or set HF_HOME to a larger disk"
    if isinstance(error, PermissionError):
        return "disk", "HF_HOME cannot be written; set it to a folder that this user may write"
    return "unreachable", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; try again"


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
