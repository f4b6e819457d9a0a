"""The layer of the served models' text: tokenizers, prompts and their versions, summaries."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from budgeting.counting import ChatTokenizer
from budgeting.values import SummaryKind
from gateway.backends.port import Backend
from gateway.config.engine import EngineSection
from gateway.config.models import ModelSection
from gateway.config.settings import Settings
from gateway.generation.grammars import WORK, GrammarChecks
from gateway.limited.process import LimitedProcess, Limits
from gateway.prompts.bounded_work import ENCODE, RENDER, encode_in, encode_limits, render_in
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.published import Publishing
from gateway.prompts.text import Models, ModelText
from gateway.prompts.text_threads import TextThreads
from gateway.prompts.versions import PromptVersions
from gateway.wiring.engine import calls_as_text
from gateway.wiring.foundation import Foundation


def make_engine_summarizer(
    text: ModelText,
    *,
    versions: PromptVersions,
    backend: Backend | None,
    new_id: Callable[[str], str],
) -> EngineSummarizer | None:
    """Build the summarizer and add it to ``text``; the caller runs its :meth:`run`.

    ``None`` if no prompt version uses it, or without ``backend``, which is on the in-process engine of
    ``text``: sentences are extracted then.
    """
    asking = [name for name in versions.ids if versions.get(name).summarizer is SummaryKind.ENGINE]
    if not asking:
        return None
    log = structlog.get_logger("gateway")
    if backend is None:
        log.warning("no engine in process to write summaries with; picking sentences", prompt_versions=asking)
        return None
    summarizer = EngineSummarizer(
        backend,
        encoder=text.tokenizer,
        max_model_len=lambda: text.max_model_len,
        until_written=text.extractive,
        new_id=new_id,
        on_failure=lambda reason: log.warning("summary not written", reason=reason),
    )
    text.summarizers[SummaryKind.ENGINE] = summarizer
    return summarizer


class Tokenizers:
    """One tokenizer for each folder; all of them share one limit of cached texts and ids."""

    def __init__(self, folders: Collection[Path], *, max_body_bytes: int, cache_bytes: int) -> None:
        self.processes: list[LimitedProcess] = []
        self._text_limits = encode_limits(max_body_bytes)
        self._read: dict[Path, ChatTokenizer] = {}
        self._cache_bytes = cache_bytes // max(1, len(set(folders)))

    def of(self, folder: Path) -> ChatTokenizer:
        """Return the folder's tokenizer. Raises TokenizerError."""
        if folder not in self._read:
            templates = LimitedProcess(RENDER, str(folder), limits=Limits())
            texts = LimitedProcess(ENCODE, str(folder), limits=self._text_limits)
            self.processes += (templates, texts)
            self._read[folder] = ChatTokenizer(
                folder,
                cache_bytes=self._cache_bytes,
                elsewhere=render_in(templates, folder),
                encode_elsewhere=encode_in(texts),
            )
        return self._read[folder]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The served models' text; that of ``engine`` is the default of ``models``.

    ``publishing`` records prompt versions in the state store.
    """

    canonicalizer: Canonicalizer
    threads: TextThreads
    versions: PromptVersions
    publishing: Publishing
    grammars: GrammarChecks
    tokenizers: Tokenizers
    models: Models


def make_model(base: Foundation) -> ModelParts:
    """Read the tokenizers and the prompt versions. Raises TokenizerError, PromptFileError."""
    settings, engine = base.settings, base.settings.engine
    folders = {one.tokenizer_folder for one in settings.engine_sections.values()}
    folders |= {Path(one.tokenizer) for one in settings.models.values() if one.tokenizer}
    tokenizers = Tokenizers(
        folders,
        max_body_bytes=settings.server.max_body_bytes,
        cache_bytes=settings.prompts.token_cache_bytes,
    )
    canonicalizer = Canonicalizer(native=settings.prompts.volatile, openai=settings.prompts.openai_volatile)
    models = make_models(settings, tokenizers, canonicalizer)
    versions = PromptVersions.configured(settings.prompts.folder)
    tokenizer_json = engine.tokenizer_folder / "tokenizer.json"
    return ModelParts(
        canonicalizer=canonicalizer,
        threads=TextThreads(clock=base.clock),
        versions=versions,
        publishing=Publishing(versions, base.state.store, base.unix_time),
        tokenizers=tokenizers,
        grammars=GrammarChecks(
            LimitedProcess(WORK, str(tokenizer_json), limits=Limits()),
            binds_calls=calls_as_text(settings.engine),
            compiles_calls=any(one.kind == "vllm" for one in settings.engine_sections.values()),
            clock=base.clock,
        ),
        models=models,
    )


def make_models(settings: Settings, tokenizers: Tokenizers, canonicalizer: Canonicalizer) -> Models:
    """Build the text of each model on an in-process engine, and of each whose section configures it."""
    engine, sections = settings.engine, settings.models

    def on_engine(section: EngineSection) -> ModelText:
        return ModelText(
            tokenizers.of(section.tokenizer_folder),
            section.max_model_len,
            canonicalizer,
            block_size=section.block_size,
            images=sections.get(section.model_id, ModelSection()).image_cost,
        )

    own = {
        model: ModelText(
            tokenizers.of(Path(section.tokenizer) if section.tokenizer else engine.tokenizer_folder),
            section.max_model_len or engine.max_model_len,
            canonicalizer,
            block_size=section.block_size or engine.block_size,
            images=section.image_cost,
        )
        for model, section in sections.items()
        if section.tokenizer
        or section.max_model_len
        or section.block_size
        or (section.images and model != engine.model_id)
    }
    own |= {section.model_id: on_engine(section) for section in settings.engines.values()}
    budgets = {
        model: section.budgets.sections for model, section in sections.items() if section.budgets is not None
    }
    return Models(on_engine(engine), own, budgets)
