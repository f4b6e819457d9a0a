"""The layer of the served model's text: tokenizer, prompts and their versions."""

from dataclasses import dataclass

from budgeting.counting import ChatTokenizer
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.published import Publishing, StreamPublished
from gateway.prompts.text import ModelText
from gateway.prompts.versions import PromptVersions
from gateway.wiring.foundation import Foundation


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The served model's text; ``publishing`` records the prompt versions in the state store."""

    tokenizer: ChatTokenizer
    canonicalizer: Canonicalizer
    text: ModelText
    versions: PromptVersions
    publishing: Publishing


def make_model(base: Foundation) -> ModelParts:
    """Read the tokenizer and the prompt versions. Raises TokenizerError, PromptFileError."""
    settings = base.settings
    tokenizer = ChatTokenizer.from_folder(settings.engine.tokenizer_folder)
    canonicalizer = Canonicalizer(native=settings.prompts.volatile, openai=settings.prompts.openai_volatile)
    versions = PromptVersions.configured(settings.prompts.folder)
    return ModelParts(
        tokenizer,
        canonicalizer,
        ModelText(tokenizer, settings.engine.max_model_len, canonicalizer),
        versions,
        Publishing(versions, StreamPublished(base.state.store, base.state.path), unix_time=base.unix_time),
    )
