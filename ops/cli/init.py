"""Writes a first configuration: for running workers, from what they report, or for the demo model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway.backends.workers.inspection import ServedModel, offers_of, read_models
from gateway.config.engine import EngineSection, WeightsSection
from gateway.config.errors import ConfigError
from gateway.weights.errors import FetchError
from gateway.weights.source import prepare
from ops.cli.console import print_json
from ops.cli.startup import one_line_errors, print_errors
from ops.client import AdminClient, AdminError

FILE = Path("sluice.yaml")
# Environment variable with the key of the workers, if they require one.
KEY_VARIABLE = "WORKER_API_KEY"
TIMEOUT_S = 10.0


def init(workers: Sequence[str], *, force: bool, as_json: bool) -> None:
    with one_line_errors(OSError):
        if FILE.exists() and not force:
            raise ConfigError(f"{FILE}: exists already; --force replaces it")
        data: dict[str, Any] = {"backends": {"local": {"kind": "engine"}}, **keys_of(os.environ)}
        if workers:
            data = worker_configuration(workers, os.environ)
        head = "# Every key and its default: docs/configuration.md; `sluice doctor` checks this file.\n"
        FILE.write_text(head + yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    if as_json:
        print_json({"file": str(FILE)})
    else:
        print(f"written: {FILE}; start with: sluice serve")


def worker_configuration(urls: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a gateway in front of workers; it learns lengths and several models while it runs.

    Raises ConfigError: no address, or a worker does not answer, or lists no model.
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            shown = url.rpartition("@")[2]  # what is before it may be a password
            raise ConfigError(f"--worker: {shown!r} is not a worker's address; allowed: http://HOST:PORT")
    bases = [url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1" for url in urls]
    key = environ.get(KEY_VARIABLE) or None
    served = [_models(base, key) for base in bases]
    backend: dict[str, Any] = {"kind": "openai", "base_urls": bases}
    if key:
        backend["api_key_env"] = KEY_VARIABLE
    model = served[0][0]
    if any(one.id != model.id for models in served for one in models):
        return {"backends": {"worker": backend}, **keys_of(environ)}
    engine = {"kind": "none", "served_model_name": model.id}
    if (tokenizer := _tokenizer(model)) is not None:
        engine["tokenizer"] = tokenizer
    else:
        print_errors(
            f"the tokenizer of {model.root or model.id} is not on this machine: prompts are counted by the "
            "worker's /tokenize, or estimated; to count exactly, set engine.tokenizer (a folder or hub id)"
        )
    backends = {"worker": {**backend, "model": model.id}}
    return {"engine": engine, "backends": backends, **keys_of(environ)}


def keys_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The ``auth`` section: without SLUICE_ADMIN_KEY keys are off, and the port is on loopback."""
    return {} if environ.get("SLUICE_ADMIN_KEY") else {"auth": {"enabled": False}}


def _models(base: str, key: str | None) -> Sequence[ServedModel]:
    """The models that a worker lists, at least one. Raises ConfigError."""
    try:
        listed = read_models(AdminClient(base, key, TIMEOUT_S, "worker").text("models").encode()).data
    except AdminError as error:
        fault = str(error) if base in str(error) else f"{base}: {error}"
        raise ConfigError(f"--worker: {fault} (a key for it goes to {KEY_VARIABLE})") from None
    except ValueError:
        raise ConfigError(f"--worker: {base}/models is not OpenAI's list of models") from None
    offered = offers_of(listed, None)
    if offered is None or isinstance(offered, str):
        raise ConfigError(f"{base}/models: {offered}")
    return offered


def _tokenizer(model: ServedModel) -> str | None:
    """The tokenizer's folder: as the worker names it if it is here, or from the hub or its cache."""
    root = model.root or model.id
    if os.path.isfile(f"{root}/tokenizer.json"):
        return root
    if root.startswith("/") or root.count("/") != 1:
        return None
    try:
        return prepare(EngineSection(kind="none", tokenizer=root), WeightsSection())[0].tokenizer
    except FetchError:
        return None
