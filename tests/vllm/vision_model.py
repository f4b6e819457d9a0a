"""A tiny Idefics3 with the demo model's tokenizer; vLLM makes random weights (``load_format: dummy``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from budgeting.images import ImageCost, ImageRounding
from tests.conformance.harness import DEMO_MODEL

TILE = 28
_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TILES = tuple([f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)])
COST = ImageCost(
    unit=TILE,
    unit_tokens=6,
    row_tokens=1,
    base_tokens=8,
    min_pixels=1,
    min_edge=2 * TILE,
    max_edge=2 * TILE,
    rounding=ImageRounding.UP_FROM_WHOLE_PIXELS,
)
"""The long edge is two tiles, each of four tokens and two around them; the whole image is one more tile."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_vision_model(folder: Path) -> Path:
    """Writes all files that vLLM reads, except weights; returns the folder."""
    for name in ("generation_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = _read("tokenizer.json")
    first = len(tokenizer["model"]["vocab"])
    for number, text in enumerate((*_SPECIAL, *_TILES), first):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": number, "content": text})
    named = {"processor_class": "Idefics3Processor"}
    text_config = {
        **_read("config.json"),
        "vocab_size": first + 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    vision_config = {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": TILE // 2,
    }
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {**_read("tokenizer_config.json"), "chat_template": TEMPLATE, **named},
        "config.json": {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "image_token_id": first,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "float32",
            "scale_factor": 1,
            "text_config": text_config,
            "vision_config": vision_config,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 2 * TILE},
            "max_image_size": {"longest_edge": TILE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            **named,
        },
        "processor_config.json": {"image_seq_len": 4, **named},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEMO_MODEL / name).read_text())
    return found
