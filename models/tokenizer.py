"""The byte-level BPE tokenizer and the chat template of the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
VOCAB_SIZE = 4096
MAX_LENGTH = 4096  # tokens

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

# Each message is rendered alone, so the text of a longer conversation always extends that of a shorter one.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>{\"name\":' + (call['function']['name'] | tojson) + ',\"arguments\":'"
    " + (call['function']['arguments'] | tojson(separators=(',', ':'))) + '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tools_text(tools: Sequence[Mapping[str, object]]) -> str:
    """Return the text of the message in which the template lists tools."""
    return f"Tools: {json.dumps(tools, ensure_ascii=False)}"


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """A call as the template shows it, and as the model writes it."""
    call = {"name": name, "arguments": arguments}
    return f"{CALL_START}{json.dumps(call, ensure_ascii=False, separators=(',', ':'))}{CALL_END}"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the vocabulary; all 256 bytes are in it, so that any Unicode text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that prices and order numbers can be copied digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"eos_token": MESSAGE_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **names,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", names)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
