"""Fetches a model of the Hugging Face hub into the hub's own cache, with huggingface_hub in a child process.

The library cannot be interrupted, so a stop kills the child; received bytes stay in the library's cache for
the next fetch. ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are honoured.

The child gets one argument, ``{"repo", "revision", "small"}``, and prints one JSON object per line: twice a
second ``{"done", "total"}``, at the end ``{"path"}`` or ``{"error"}``.
"""

import errno
import glob
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from engine.own_modules import with_own_modules
from gateway.weights.errors import FetchError, FetchStopped
from gateway.weights.location import HubModel, is_small, needed, unneeded_patterns
from gateway.weights.values import OnProgress, Progress, ignore

TICK_S = 0.5
HUB_TIMEOUT_S = 10.0


class HubFetcher:
    """Fetches a model; ``into`` is ignored, because the hub's cache is shared with other programs.

    The constructor raises FetchError without huggingface_hub.
    """

    def __init__(self, model: HubModel) -> None:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise FetchError("a hub id needs huggingface_hub: pip install 'sluice-gateway[hub]'")
        self._model = model

    def fetch(
        self,
        into: Path,
        *,
        small: bool = False,
        on_progress: OnProgress = ignore,
        stop: threading.Event | None = None,
    ) -> Path:
        repo = self._model.repo
        request = {"repo": repo, "revision": self._model.revision, "small": small}
        with subprocess.Popen(
            [sys.executable, "-m", "gateway.weights.hub", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=with_own_modules(os.environ),
        ) as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    if stop is not None and stop.is_set():
                        raise FetchStopped(f"{repo}: fetching was stopped; what has arrived is kept")
                    if not line.startswith("{"):
                        continue
                    message = json.loads(line)
                    if "path" in message:
                        return Path(message["path"])
                    if "error" in message:
                        raise FetchError(f"{repo}: {message['error']}")
                    on_progress(Progress(message["done"], message["total"]))
            finally:
                child.kill()
        raise FetchError(f"{repo}: the hub's library ended without an answer; start again")


def main() -> None:
    request = json.loads(sys.argv[1])
    from huggingface_hub.utils.tqdm import tqdm

    counters: list[Any] = []

    class Counter(tqdm):
        """A progress bar that only counts."""

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
            _send(done=done, total=total)

    with open(os.devnull, "w", encoding="utf-8") as sink:
        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            answer = {"path": _download(request["repo"], request["revision"], request["small"], Counter)}
        except Exception as error:  # the library raises its own errors, its HTTP client's and OSErrors
            answer = {"error": _meaning(error)}
        over.set()
        ticker.join()
        _send(**answer)


def _download(repo: str, revision: str | None, small: bool, counter: Any) -> str:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        raise
    except Exception as error:  # an error of the HTTP client, or HF_HUB_OFFLINE is set
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
    patterns = [glob.escape(name) for name in names if is_small(name) or not small]
    return huggingface_hub.snapshot_download(
        repo, revision=revision, allow_patterns=patterns, tqdm_class=counter
    )


def _meaning(error: Exception) -> str:
    import huggingface_hub.errors as hub

    if isinstance(error, hub.GatedRepoError):
        return "the model is gated; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, hub.RepositoryNotFoundError):
        return "there is no such folder here, and no such model on the hub that HF_TOKEN may read"
    if isinstance(error, hub.RevisionNotFoundError):
        return "the model has no such revision; check the part after @"
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return (
            "not in the hub's cache (HF_HOME), and the hub is not reached or HF_HUB_OFFLINE is set; fetch it "
            "once with the network, or name a folder or s3:// prefix in its place"
        )
    if isinstance(error, hub.HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        denied = status in (401, 403)
        advice = "set HF_TOKEN to a token that may read the model" if denied else "try again later"
        return f"the hub says {status}; {advice}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"HF_HOME: {error.strerror}; set it to a folder that has space and that this user may write"
    text = " ".join(str(error).split())[:300]
    return (
        f"there is no such folder here, and the hub does not answer ({type(error).__name__}: {text}); name "
        "an existing folder in its place, or check the network, HF_ENDPOINT and the proxy"
    )


def _send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
