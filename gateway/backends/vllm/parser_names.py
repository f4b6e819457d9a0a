"""Which of vLLM's parsers read a model's answers, from its configuration and chat template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgeting.errors import TokenizerError
from budgeting.tokenizer_files import read_tokenizer_files
from gateway.config.engine import EngineSection

# For ``engine.tool_parser`` and ``engine.reasoning_parser``: no parser, whatever the model is.
NO_PARSER = "none"


@dataclass(frozen=True, slots=True)
class ParserNames:
    """vLLM's names of the parsers; ``None``: there is none."""

    tool: str | None = None
    reasoning: str | None = None


_BY_TYPE: Mapping[str, ParserNames] = {
    "gpt_oss": ParserNames("openai", "openai_gptoss"),
    "glm4_moe": ParserNames("glm45", "glm45"),
    "kimi_k2": ParserNames("kimi_k2"),
    "minimax_m2": ParserNames("minimax_m2", "minimax_m2"),
    "seed_oss": ParserNames("seed_oss", "seed_oss"),
    "gemma4": ParserNames("gemma4", "gemma4"),
    "llama4": ParserNames("llama4_pythonic"),
}
# Marks of a format of calls in a chat template, and the parser of that format; the first match counts.
_TOOL_MARKS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
    (("Environment: ipython",), "llama3_json"),
)


def parser_names(section: EngineSection) -> ParserNames:
    """The parsers that the section names, else those found from the model's files."""
    found = _found(section)
    return ParserNames(
        _chosen(section.tool_parser, found.tool), _chosen(section.reasoning_parser, found.reasoning)
    )


def model_type(section: EngineSection) -> str:
    """The model's type in ``transformers``; empty where its folder does not say."""
    return str(_json(Path(section.model) / "config.json").get("model_type", ""))


def _chosen(given: str | None, found: str | None) -> str | None:
    return found if given is None else None if given == NO_PARSER else given


def _found(section: EngineSection) -> ParserNames:
    folder = section.tokenizer_folder
    if "response_template" in _json(folder / "tokenizer_config.json"):
        return ParserNames("hf", "hf")
    try:
        template = read_tokenizer_files(folder).template
    except TokenizerError:
        template = ""
    kind = model_type(section)
    names = _BY_TYPE.get(kind)
    if names is None:
        thinks = "<think>" in template or "</think>" in template
        reasoning = None if not thinks else "qwen3" if kind.startswith("qwen3") else "deepseek_r1"
        template = template.replace('\\"', '"')
        tool = next((name for marks, name in _TOOL_MARKS if all(mark in template for mark in marks)), None)
        names = ParserNames(tool, reasoning)
    # A template that does not show the tools to the model leaves nothing to parse.
    return names if "tools" in template else ParserNames(None, names.reasoning)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
