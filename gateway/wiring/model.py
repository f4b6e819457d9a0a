"""The layer of the served model's text: tokenizer, prompts and their versions, summaries."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from budgeting.counting import ChatTokenizer
from budgeting.values import SummaryKind
from gateway.backends.port import Backend
from gateway.generation.grammars import WORK, GrammarChecks
from gateway.limited.process import LimitedProcess, Limits
from gateway.prompts import bounded_templates
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.published import Publishing, StreamPublished
from gateway.prompts.text import ModelText
from gateway.prompts.text_threads import TextThreads
from gateway.prompts.versions import PromptVersions
from gateway.wiring.foundation import Foundation


def make_engine_summarizer(
    text: ModelText,
    tokenizer: ChatTokenizer,
    *,
    versions: PromptVersions,
    backends: Mapping[str, Backend],
    on_engine: Collection[str],
    new_id: Callable[[str], str],
) -> EngineSummarizer | None:
    """The summarizer, already added to ``text``; the caller runs its :meth:`run`.

    ``None`` when no prompt version asks for it, or there is no engine in process: sentences are picked then.
    """
    asking = [name for name in versions.ids if versions.get(name).summarizer is SummaryKind.ENGINE]
    if not asking:
        return None
    log = structlog.get_logger("gateway")
    if not on_engine:
        log.warning("no engine in process to write summaries with; picking sentences", prompt_versions=asking)
        return None
    summarizer = EngineSummarizer(
        backends[min(on_engine)],
        encoder=tokenizer,
        max_model_len=lambda: text.max_model_len,
        until_written=text.extractive,
        new_id=new_id,
        on_failure=lambda reason: log.warning("summary not written", reason=reason),
    )
    text.add_summarizer(SummaryKind.ENGINE, summarizer)
    return summarizer


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The served model's text; ``publishing`` records the prompt versions in the state store."""

    tokenizer: ChatTokenizer
    canonicalizer: Canonicalizer
    text: ModelText
    threads: TextThreads
    versions: PromptVersions
    publishing: Publishing
    grammars: GrammarChecks
    templates: LimitedProcess


def make_model(base: Foundation) -> ModelParts:
    """Read the tokenizer and the prompt versions. Raises TokenizerError, PromptFileError."""
    settings = base.settings
    folder = settings.engine.tokenizer_folder
    templates = LimitedProcess(bounded_templates.WORK, str(folder), limits=Limits())
    tokenizer = ChatTokenizer.from_folder(folder, elsewhere=bounded_templates.render_in(templates, folder))
    canonicalizer = Canonicalizer(native=settings.prompts.volatile, openai=settings.prompts.openai_volatile)
    versions = PromptVersions.configured(settings.prompts.folder)
    published = StreamPublished(base.state.store, base.state.path)
    tokenizer_json = folder / "tokenizer.json"
    return ModelParts(
        tokenizer=tokenizer,
        canonicalizer=canonicalizer,
        text=ModelText(tokenizer, settings.engine.max_model_len, canonicalizer),
        threads=TextThreads(),
        versions=versions,
        publishing=Publishing(versions, published, unix_time=base.unix_time),
        templates=templates,
        grammars=GrammarChecks(LimitedProcess(WORK, str(tokenizer_json), limits=Limits())),
    )
