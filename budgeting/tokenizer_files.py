"""Reads the text side of a model folder: tokenizer, special tokens, chat template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from budgeting.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files' contents; ``specials`` are the special tokens by the names templates use, e.g.
    ``eos_token``."""

    folder: str
    tokenizer_json: str
    template: str
    specials: Mapping[str, str]


def read_tokenizer_files(folder: str | Path) -> TokenizerFiles:
    """Read a folder as published on model hubs. Raises TokenizerError naming the file and the problem."""
    root = Path(folder)
    if not root.is_dir():
        raise TokenizerError(
            str(folder),
            "no such folder; needed: a model's folder, which `engine.model` or a `tokenizer` names",
        )
    if not (root / "tokenizer.json").is_file():
        raise TokenizerError(
            str(folder), "tokenizer.json is missing; needed: a tokenizer in the format of `tokenizers`"
        )
    config = _json_object(root, "tokenizer_config.json")
    named = _special_tokens(_json_object(root, "special_tokens_map.json"))
    named.update(_special_tokens(config))
    return TokenizerFiles(
        folder=str(folder),
        tokenizer_json=_text(root, "tokenizer.json"),
        template=_template(root, config),
        specials=MappingProxyType(named),
    )


def _template(root: Path, config: Mapping[str, object]) -> str:
    """The chat template: the file wins over the config, as in ``transformers``; of a list, ``default``."""
    if (root / "chat_template.jinja").is_file():
        return _text(root, "chat_template.jinja")
    given = config.get("chat_template")
    if isinstance(given, list):
        named = (one for one in given if isinstance(one, dict) and one.get("name") == "default")
        given = next(named, {}).get("template")
    if isinstance(given, str):
        return given
    raise TokenizerError(
        str(root), "no chat template; needed: chat_template.jinja, or chat_template in tokenizer_config.json"
    )


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by name, from ``"eos_token": "</s>"`` or ``"eos_token": {"content": "</s>", …}``."""
    named: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def _json_object(root: Path, name: str) -> Mapping[str, object]:
    """A JSON file's object; empty when there is no such file."""
    if not (root / name).is_file():
        return {}
    try:
        value = json.loads(_text(root, name))
    except ValueError as error:
        raise TokenizerError(str(root), f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(str(root), f"{name} holds a {type(value).__name__}; needed: an object")
    return value


def _text(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(str(root), f"{name} cannot be read: {error}") from error
