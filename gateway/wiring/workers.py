"""Builds a pool of workers from its section of the configuration."""

import random
from collections.abc import Awaitable, Callable, Mapping, Set

from adapters.values import Adapter
from gateway.backends.lora_slots import already_here
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.dialect import FEATURES, CompletionWriter, Dialect
from gateway.backends.workers.pool import WorkerPool
from gateway.backends.workers.pool_model import ModelReading, PoolModel, ReadModel
from gateway.backends.workers.serving_pool import ServingPool
from gateway.backends.workers.worker import Worker
from gateway.backends.workers.worker_choice import WorkerChoice
from gateway.config.backends import OpenAIBackend
from gateway.contracts.features import VLLM_FEATURES, Feature
from gateway.wiring.worker_connections import make_connections
from resilience.turns import Turns

# A Sluice worker must not answer with a fallback: this gateway has its own fallback chain and ledger.
NO_FALLBACK = ("prefer", "sluice-no-fallback")


def make_workers(
    name: str,
    section: OpenAIBackend,
    *,
    reading: ModelReading,
    read: ReadModel | None = None,
    clock: Callable[[], float],
    turns: Turns,
    environ: Mapping[str, str],
    bring: Callable[[Adapter], Awaitable[None]] = already_here,
    incapable: Callable[[str], frozenset[Feature]] = lambda model: frozenset(),
    changed: Callable[[ServingPool, Set[str]], None] = lambda pool, gone: None,
) -> ServingPool:
    """Build the pool; nothing connects yet. Raises ConfigError for the key, a certificate or the proxy.

    ``read`` takes the model that the workers list; until then ``reading`` is that of the configured model.
    ``bring`` puts an adapter's files into the gateway's folder before a worker loads them. ``incapable``
    returns the features that a model lacks. :class:`ServingPool` describes ``changed``.
    """
    detect = section.dialect == "auto"
    dialect = Dialect.VLLM if detect else Dialect(section.dialect)
    features = _features(section, dialect)
    urls = [url.rstrip("/") for url in section.base_urls]
    choice = WorkerChoice(
        urls,
        factor=section.affinity_load_factor,
        index_blocks=section.affinity_index_blocks,
        affinity=section.affinity,
    )
    headers = (NO_FALLBACK,) if detect or dialect is Dialect.SLUICE else ()
    connections = make_connections(name, section, headers, environ)
    workers = [
        Worker(
            url,
            section,
            make_client=connections.client,
            dialect=dialect,
            lists_models=dialect is Dialect.VLLM and Feature.LORA in features,
            bring=bring,
            on_return=choice.forget,
            clock=clock,
        )
        for url in urls
    ]

    def make(model: str) -> WorkersBackend:
        return WorkersBackend(
            name,
            section,
            model=PoolModel(model, read, reading, known=model != name or model == section.model),
            workers=workers,
            writer=CompletionWriter(
                model, section, dialect, section.prompt == "token_ids", connections.templates
            ),
            pool=WorkerPool(workers, choice, max_running=section.max_running, random=random.Random()),
            features=features,
            incapable=incapable,
            clock=clock,
            turns=turns,
        )

    pool = ServingPool(
        name,
        workers,
        section.model,
        make=make,
        changed=changed,
        background=connections.key.watch,
        clock=clock,
    )
    # The list of a hosted service need not contain the configured model.
    if section.model is None or dialect is not Dialect.OPENAI:
        for worker in workers:
            worker.detect(pool, kind=detect or dialect is Dialect.SLUICE)
    return pool


def _features(section: OpenAIBackend, dialect: Dialect) -> frozenset[Feature]:
    features = FEATURES[dialect] if section.features is None else frozenset(section.features)
    features |= section.unknown_features
    return features | VLLM_FEATURES if Feature.FIELDS_PASSED in features else features
