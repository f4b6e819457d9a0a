"""Makes the served model's files local.

``prepare`` runs first: it fetches the small files (configuration, tokenizer) and returns a section in which
the model is a local folder, so that no other module needs to handle hubs and buckets. The weights are fetched
while the gateway is already alive but not ready.
"""

import asyncio
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config.engine import EngineSection, WeightsSection
from gateway.weights.errors import FetchError, FetchStopped
from gateway.weights.hub import HubFetcher
from gateway.weights.location import HubModel, S3Prefix, locate
from gateway.weights.s3 import S3Fetcher
from gateway.weights.values import Fetcher, OnProgress, ignore

# Configuration and tokenizer have a few tens of MB; a fetch that takes longer than this fails.
SMALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an in-process engine's model.

    ``source`` is the configured address; without a ``fetcher`` the files are local.
    """

    source: str
    folder: Path
    fetcher: Fetcher | None
    cache: Path
    timeout_s: float

    @property
    def remote(self) -> bool:
        return self.fetcher is not None

    async def fetch(self, on_progress: OnProgress = ignore) -> Path:
        """Fetch missing files; a cancellation stops the fetch and keeps received bytes. Raises FetchError."""
        fetcher = self.fetcher
        if fetcher is None:
            return self.folder
        stop = threading.Event()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.to_thread(fetcher.fetch, self.cache, on_progress=on_progress, stop=stop)
        except TimeoutError:
            raise FetchError(
                f"{self.source}: not here after weights.timeout_seconds ({self.timeout_s:g}); what has "
                "arrived is kept: start again, or raise it"
            ) from None
        finally:
            stop.set()


def prepare(engine: EngineSection, section: WeightsSection) -> tuple[EngineSection, Weights]:
    """Fetch the small files of an engine's model and tokenizer, for at most ``SMALL_TIMEOUT_S`` each.

    Returns the section with folders instead of addresses, and weights, not yet fetched. Raises FetchError.
    """
    cache = Path(section.cache_folder).expanduser()
    # Without an in-process engine the model is only used to count tokens.
    model_used = engine.kind != "none" or engine.tokenizer is None
    model = locate(engine.model) if model_used else Path(engine.model)
    changes: dict[str, object] = {}
    if engine.tokenizer is not None and not isinstance(where := locate(engine.tokenizer), Path):
        changes["tokenizer"] = str(_small(_fetcher(where, section), where, cache))
    if isinstance(model, Path):
        weights = Weights(engine.model, model, None, cache, section.timeout_seconds)
    else:
        fetcher = _fetcher(model, section)
        folder = _small(fetcher, model, cache)
        # The public id is the last part of the address, not the name of the cache folder.
        address = model.repo if isinstance(model, HubModel) else model.prefix or model.bucket
        name = engine.served_model_name or address.rpartition("/")[2]
        changes |= {"model": str(folder), "served_model_name": name}
        if isinstance(model, HubModel):
            # The snapshot's folder has the commit's name, so the weights are of the tokenizer's commit.
            fetcher = HubFetcher(replace(model, revision=folder.name))
        used = fetcher if engine.kind != "none" else None
        weights = Weights(engine.model, folder, used, cache, section.timeout_seconds)
    return engine.model_copy(update=changes) if changes else engine, weights


def _fetcher(location: HubModel | S3Prefix, section: WeightsSection) -> Fetcher:
    return HubFetcher(location) if isinstance(location, HubModel) else S3Fetcher(location, section)


def _small(fetcher: Fetcher, location: HubModel | S3Prefix, cache: Path) -> Path:
    stop = threading.Event()
    timer = threading.Timer(SMALL_TIMEOUT_S, stop.set)
    timer.daemon = True
    timer.start()
    try:
        return fetcher.fetch(cache, small=True, stop=stop)
    except FetchStopped:
        raise FetchError(
            f"{location.url}: configuration and tokenizer are not here after {SMALL_TIMEOUT_S:g} s; "
            "start again"
        ) from None
    finally:
        timer.cancel()
