"""The models that workers list: their tokenizers and context lengths."""

import asyncio
import importlib.util
import os.path
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from budgeting.errors import TokenizerError
from budgeting.estimating import EstimatingCounter
from budgeting.learned_counter import LearnedCounter, PromptCounter
from gateway.backends.port import Work
from gateway.backends.workers.inspection import ServedModel
from gateway.backends.workers.pool_model import ModelReading
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask, PoolTokens
from gateway.config.backends import OpenAIBackend
from gateway.config.models import ModelSection
from gateway.config.settings import Settings
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from gateway.wiring.model import Tokenizers

TOKENIZER_FILE = "tokenizer.json"


@dataclass(eq=False)
class ServedModels:
    """Adds the models that workers list to the gateway's models; see :class:`ReadModel`.

    A model's tokenizer is the first of: that of the model's section; that of ``engine.tokenizer`` or
    ``engine.model``, if set and there is no in-process engine; that in the folder which the worker reports,
    if readable here; that in the Hugging Face cache. Without any, the workers count the tokens, or the
    gateway estimates them (:class:`budgeting.learned_counter.LearnedCounter`).
    """

    settings: Settings
    models: Models
    tokenizers: Tokenizers
    canonicalizer: Canonicalizer
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._estimates = EstimatingCounter()
        # For each model, its context length in each pool that serves it.
        self._found: dict[str, dict[str, int | None]] = {}
        engine = self.settings.engine
        # The section ``engine`` describes the workers' model only if there is no in-process engine.
        self._given = engine.model_fields_set if engine.kind == "none" else set[str]()
        self._engine_names_one = bool(self._given & {"tokenizer", "model"})
        self._log = structlog.get_logger("gateway.workers")

    async def read(
        self, pool: str, found: ServedModel, length: int | None, ask: Ask | None = None
    ) -> ModelReading:
        """Add a pool's model, and return its token counting and tokenizer check."""
        engine, models = self.settings.engine, self.models
        if engine.kind != "none" and found.id == engine.model_id:
            return await asyncio.to_thread(_reading, models.of(found.id).tokenizer)
        tokenizer = await asyncio.to_thread(self._tokenizer, found)
        learned = None
        if tokenizer is None:
            workers = None if ask is None else PoolTokens(found.id, ask, self.clock)
            tokenizer = learned = LearnedCounter(found.id, self._estimates, workers)
        self._found.setdefault(found.id, {})[pool] = length
        self._put(found.id, tokenizer)
        return await asyncio.to_thread(_reading, tokenizer) if learned is None else _reading_of(learned)

    def forget(self, pool: str, gone: Set[str]) -> None:
        """Remove the models ``gone``, which a pool no longer serves; another pool may still serve them."""
        for model in gone & self._found.keys():
            self._found[model].pop(pool, None)
            if self._found[model]:
                self.models.of(model).limit(self._length(model))
            else:
                del self._found[model]
                self.models.own.pop(model, None)

    def hosted(self, section: OpenAIBackend) -> ModelReading | None:
        """Return the reading of a hosted service's configured model; ``None`` if a tokenizer is named."""
        model, own = section.model, self.settings.models.get(section.model or "")
        named = self._engine_names_one or (own is not None and own.tokenizer)
        if section.dialect != "openai" or model is None or named:
            return None
        counter = LearnedCounter(model, self._estimates, None)
        self._put(model, counter)
        return _reading_of(counter)

    def _length(self, model: str) -> int:
        """Return the context length: the shortest of the pools' and the configured one."""
        engine, section = self.settings.engine, self.settings.models.get(model, ModelSection())
        lengths = {one for one in self._found.get(model, {}).values() if one}
        if len(lengths) > 1:
            self._log.warning(
                "pools differ in length; the shortest holds", model=model, lengths=sorted(lengths)
            )
        if section.max_model_len:
            lengths.add(section.max_model_len)
        elif "max_model_len" in self._given:
            lengths.add(engine.max_model_len)
        return min(lengths, default=engine.max_model_len)

    def _put(self, model: str, tokenizer: PromptCounter) -> None:
        engine, section = self.settings.engine, self.settings.models.get(model, ModelSection())
        longest = self._length(model)
        text = ModelText(
            tokenizer,
            longest,
            self.canonicalizer,
            block_size=section.block_size or engine.block_size,
            images=section.image_cost,
        )
        self.models.own[model] = text
        self._log.info("model of workers", model=model, max_model_len=longest, counted_by=tokenizer.encoder)

    def _tokenizer(self, found: ServedModel) -> PromptCounter | None:
        """Return the tokenizer that can be read on this machine, if any. Blocks."""
        section, tokenizers = self.settings.models.get(found.id), self.tokenizers
        if section is not None and section.tokenizer:
            return tokenizers.of(Path(section.tokenizer))
        if self._engine_names_one:
            return self.models.default.tokenizer
        root = found.root or found.id
        # Of `os.path`, since the worker's path may be one that cannot be asked about here.
        folder = Path(root) if os.path.isfile(f"{root}/{TOKENIZER_FILE}") else _cached_folder(root)
        if folder is not None:
            try:
                return tokenizers.of(folder)
            except TokenizerError as error:
                self._log.warning("tokenizer not readable", model=found.id, reason=str(error))
        return None


def _cached_folder(repo: str) -> Path | None:
    """Return a model's folder in the Hugging Face cache, if it has a tokenizer; uses no network."""
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


def _reading_of(counter: LearnedCounter) -> ModelReading:
    return ModelReading(counter.token_bytes, learn=partial(_learn, counter))


def _learn(counter: LearnedCounter, work: Work, reported: int) -> None:
    if work.partial is None and not work.template_kwargs:
        counter.learn(work.messages, work.tools, reported)
