"""The models that workers list: their tokenizers and lengths."""

import asyncio
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import structlog

from budgeting.counter import PromptCounter
from budgeting.errors import TokenizerError
from gateway.backends.port import Backend
from gateway.backends.workers.inspection import ServedModel
from gateway.backends.workers.pool_model import ModelReading
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.config.models import ModelSection
from gateway.config.settings import Settings
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.models import Models
from gateway.prompts.text import ModelText
from gateway.wiring.model import Tokenizers

TOKENIZER_FILE = "tokenizer.json"


class ServedModels:
    """Makes the models that workers list known to the gateway; see :class:`ReadModel`.

    A tokenizer is, in this order: the one that the model's section names; that of ``engine.tokenizer``; that
    in the folder that the worker names, where it is readable here; the one in the hub's cache; the engine's.

    Args:
        backends: all of them; filled later.
    """

    def __init__(
        self,
        settings: Settings,
        models: Models,
        tokenizers: Tokenizers,
        canonicalizer: Canonicalizer,
        backends: Mapping[str, Backend],
    ) -> None:
        self._settings = settings
        self._models = models
        self._tokenizers = tokenizers
        self._canonicalizer = canonicalizer
        self._backends = backends
        self._found: set[str] = set()
        self._log = structlog.get_logger("gateway.workers")

    async def read(self, found: ServedModel, length: int | None) -> ModelReading:
        """The reading of this model; those found earlier that no backend serves any more are forgotten."""
        engine, models = self._settings.engine, self._models
        if engine.kind != "none" and found.id == engine.model_id:
            return await asyncio.to_thread(_reading, models.tokenizer(found.id))
        tokenizer = await asyncio.to_thread(self._tokenizer, found)
        section = self._settings.models.get(found.id)
        given = [section.max_model_len] if section is not None and section.max_model_len else []
        if not given and "max_model_len" in engine.model_fields_set:
            given = [engine.max_model_len]
        longest = min([*given, *([length] if length else [])], default=engine.max_model_len)
        section = section or ModelSection()
        text = ModelText(
            tokenizer,
            longest,
            self._canonicalizer,
            block_size=section.block_size or engine.block_size,
            images=section.image_cost,
        )
        models.put(found.id, text)
        self._log.info(
            "model of workers", model=found.id, max_model_len=longest, counted_by=tokenizer.encoder
        )
        self._found.add(found.id)
        for other in self._found - {found.id} - {one.model for one in self._backends.values()}:
            self._found.remove(other)
            models.remove(other)
        return await asyncio.to_thread(_reading, tokenizer)

    def _tokenizer(self, found: ServedModel) -> PromptCounter:
        """Blocks."""
        section, tokenizers = self._settings.models.get(found.id), self._tokenizers
        if section is not None and section.tokenizer:
            return tokenizers.of(Path(section.tokenizer))
        if self._settings.engine.tokenizer is None:
            root = found.root or found.id
            folder = Path(root) if (Path(root) / TOKENIZER_FILE).is_file() else _cached_folder(root)
            if folder is not None:
                try:
                    return tokenizers.of(folder)
                except TokenizerError as error:
                    self._log.warning("tokenizer not readable", model=found.id, reason=str(error))
        return self._models.default.tokenizer


def _cached_folder(repo: str) -> Path | None:
    """The folder of a model of the hub in the hub's cache, if its tokenizer is there; asks no network."""
    if repo.count("/") != 1 or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, TOKENIZER_FILE)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _reading(tokenizer: PromptCounter) -> ModelReading:
    return ModelReading(tokenizer.token_bytes, TokenizerCheck.of(tokenizer))
