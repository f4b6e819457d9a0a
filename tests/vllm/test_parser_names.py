"""Which of vLLM's parsers are found from a model's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.backends.vllm.parser_names import ParserNames, parser_names
from gateway.config.engine import EngineSection

QWEN = """{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>{\\"name\\": , \\"arguments\\": }</tool_call>"""


@pytest.mark.parametrize(
    ("kind", "template", "expected"),
    [
        ("qwen2", QWEN, ParserNames("hermes")),
        ("qwen3", QWEN + "<think>", ParserNames("hermes", "qwen3")),
        ("qwen3_moe", "{{ tools }}<tool_call><function=", ParserNames("qwen3_coder")),
        ("llama", "{{ tools }}<|python_tag|>", ParserNames("llama3_json")),
        ("llama", "<think>", ParserNames(None, "deepseek_r1")),
        ("mistral", "{{ tools }}[TOOL_CALLS]", ParserNames("mistral")),
        ("gpt_oss", "{{ tools }}", ParserNames("openai", "openai_gptoss")),
        ("glm4_moe", "no list of functions", ParserNames(None, "glm45")),
        ("llama", "{{ messages }}", ParserNames()),
    ],
)
def test_parsers_are_found_from_the_model(
    tmp_path: Path, kind: str, template: str, expected: ParserNames
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert parser_names(EngineSection(kind="vllm", model=str(tmp_path))) == expected


def test_a_setting_goes_before_what_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"response_template": {}}')
    assert parser_names(EngineSection(kind="vllm", model=str(tmp_path))) == ParserNames("hf", "hf")
    section = EngineSection(kind="vllm", model=str(tmp_path), tool_parser="hermes", reasoning_parser="none")
    assert parser_names(section) == ParserNames("hermes")
