"""The first layer: settings, clocks, ids, the event bus, tracing, the state store and the audit log."""

import importlib.metadata
import importlib.util
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.config.errors import ConfigError
from gateway.config.secret_keys import read_keys
from gateway.config.settings import SEAL_KEY, Settings
from gateway.config.state import STATE_FOLDER
from gateway.health.rolling_stats import RollingStats
from gateway.images.fetch import ImageFetcher, NameLookup
from gateway.images.reading import ImageReader
from gateway.requests.body_memory import BODIES, BodyMemory
from gateway.state.audit import KEY_VARIABLE, Audit
from gateway.weights.source import Weights, prepare
from gateway.wiring.state import StateParts, make_state, make_state_folder
from gateway.wiring.tracing import make_tracing
from observability.subscribers import EventDispatcher
from observability.tracing import Tracing
from resilience.turns import Turns

if TYPE_CHECKING:
    from gateway.keys.sealing import AesCipher


@dataclass(frozen=True, slots=True)
class Foundation:
    """The parts that every other layer may use.

    ``settings`` name the models by local folders; ``weights``, by engine name, may still have to be fetched.
    ``new_id`` takes the prefix of the id.
    """

    settings: Settings
    weights: Mapping[str | None, Weights]
    version: str
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    new_id: Callable[[str], str]
    events: EventDispatcher
    rolling_stats: RollingStats
    tracing: Tracing
    state: StateParts
    audit: Audit
    bodies: BodyMemory
    images: ImageReader
    turns: Turns


def make_foundation(settings: Settings) -> Foundation:
    """Fetch the model's small files, and build what needs no other layer. Raises ConfigError, FetchError."""
    clock, unix_time = time.monotonic, time.time
    version = importlib.metadata.version("sluice-gateway")
    found = {name: prepare(one, settings.weights) for name, one in settings.engine_sections.items()}
    engines = {name: engine for name, (engine, _) in found.items()}
    settings = settings.model_copy(update={"engine": engines.pop(None), "engines": engines})
    if any(f"///{STATE_FOLDER}/" in url for url in (settings.state.url, settings.ledger.url)):
        make_state_folder(STATE_FOLDER, "state.url, ledger.url")
    bodies = BodyMemory(settings.server.max_bodies_bytes or BODIES * settings.server.max_body_bytes)
    state = make_state(settings.state, clock=clock, unix_time=unix_time)
    return Foundation(
        settings=settings,
        weights={name: weights for name, (_, weights) in found.items()},
        version=version,
        clock=clock,
        unix_time=unix_time,
        new_id=new_id,
        events=EventDispatcher(),
        rolling_stats=RollingStats(clock),
        tracing=make_tracing(settings.tracing, version),
        state=state,
        audit=Audit(
            state.store,
            unix_time=unix_time,
            required=settings.audit.required,
            keys=read_keys("audit.key_file", settings.audit.key_file, KEY_VARIABLE, os.environ),
        ),
        bodies=bodies,
        images=make_image_reader(settings, bodies, clock),
        turns=Turns(),
    )


def make_cipher(settings: Settings, purpose: str) -> "AesCipher | None":
    """Build the encryption of reasoning or files; ``None`` without a key. Raises ConfigError: the keys, or
    the package that needs them.
    """
    file = settings.responses.seal_key_file
    keys = read_keys("responses.seal_key_file", file, SEAL_KEY, os.environ)
    if not keys:
        return None
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(f"{SEAL_KEY} needs cryptography: pip install 'sluice-gateway[sealing]'")
    from gateway.keys.sealing import AesCipher

    return AesCipher(keys, purpose)


def new_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(10).hex()}"


def make_image_reader(settings: Settings, bodies: BodyMemory, clock: Callable[[], float]) -> ImageReader:
    """Build the reader of images; it fetches urls if ``images.fetch`` is set and a model takes images."""
    section, fetcher = settings.images, None
    if section.fetch and any(model.images is not None for model in settings.models.values()):
        fetcher = ImageFetcher(section, look_up=NameLookup(), tls=ssl.create_default_context())
    return ImageReader(section, bodies.holding, fetcher, clock)
