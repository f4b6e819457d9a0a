"""Small model folders for tests: tokenizers trained on a few lines, and templates of each kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "You are a manga shopping assistant. Follow catalog grounding rules.\n\nEvidence:\n[catalog manga_441] "
    "Vinland Saga, volume 1, in stock.\nContext:\nlocale: ja\ntime: 2026-11-20T10:00:00Z",
    "What should I read after Berserk? I liked the art, the story and the dark mood of it.",
    "We ship within two days; returns are free for thirty days. 何かお勧めはありますか。在庫はあります。",
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Begins with the BOS token and trims contents, like the templates of the Llama 3 family.
HEADERS = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim"
    " + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)

# Every message contains the number of messages, so none can be rendered alone.
COUNTING = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ loop.index }}/{{ messages | length }} "
    "{{ message.role }}\n{{ message.content }}<|eot|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

# Roles must alternate, an optional system message first; no message starts with a control token.
ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set offset = 1 %}"
    "{{ messages[0]['content'] }}\n"
    "{% else %}{% set offset = 0 %}{% endif %}{% for message in messages[offset:] %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

# A plain loop with only line ends between messages: each renders alone, but tokens may span two messages.
UNMARKED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Tools in the first block, calls and results in the format of Hermes-style ChatML models.
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role }}{% if message.name %}{{ ' ' + message.name }}{% endif %}"
    "{{ '\n' + (message.reasoning_content or '') + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}"
    "{{ note or '' }}{% endif %}"
)


def byte_level(special: Sequence[str], corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """A byte-level BPE tokenizer whose added tokens are ``special``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus] * 3, trainer)
    return tokenizer


def metaspace(special: Sequence[str]) -> Tokenizer:
    """A Unigram tokenizer that marks the start of a text, and whose pieces can spell its control tokens."""
    pieces = sorted({c for text in CORPUS for c in text.replace(" ", "▁")} | {"▁", "\n"} | set("<>|/s[]INST"))
    vocab = [("<unk>", 0.0), *((token, -1.0) for token in special)]
    vocab += [(piece, -5.0) for piece in pieces] + [("▁the", -4.0), ("▁manga", -4.0), ("in", -4.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<unk>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def write_folder(path: Path, tokenizer: Tokenizer, template: str, **named: str) -> Path:
    """A model folder with this tokenizer and template; ``named`` are its special tokens."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def write_all(root: Path) -> dict[str, Path]:
    """One folder of each kind, by name."""
    llama = ["<|begin|>", "<|start|>", "<|end|>", "<|eot|>"]
    inst = ["<s>", "</s>"]
    return {
        "chatml": write_folder(
            root / "chatml", byte_level(["<|im_start|>", "<|im_end|>"]), CHATML, eos_token="<|im_end|>"
        ),
        "headers": write_folder(
            root / "headers", byte_level(llama), HEADERS, bos_token="<|begin|>", eos_token="<|eot|>"
        ),
        "counting": write_folder(
            root / "counting", byte_level(llama), COUNTING, bos_token="<|begin|>", eos_token="<|eot|>"
        ),
        "unmarked": write_folder(root / "unmarked", byte_level(llama), UNMARKED, eos_token="<|eot|>"),
        "alternating": write_folder(
            root / "alternating", byte_level(inst), ALTERNATING, bos_token="<s>", eos_token="</s>"
        ),
        "metaspace": write_folder(
            root / "metaspace", metaspace(inst), ALTERNATING, bos_token="<s>", eos_token="</s>"
        ),
    }
