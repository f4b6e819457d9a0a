"""vLLM's parsers of tool calls and reasoning, as a library: how an answer is cut changes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from budgeting.values import Message, Role, Tool, ToolChoice, ToolChoiceMode
from engine.errors import InvalidConfig
from gateway.backends.port import Work
from gateway.backends.vllm import compat
from gateway.backends.vllm.parser_names import ParserNames
from gateway.backends.vllm.values import EngineRequest
from gateway.contracts.events import AnswerFold
from gateway.contracts.values import FinishReason, ResponseFormat, Sampling
from tests.conformance.harness import DEMO_MODEL
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module", autouse=True)
def as_the_gateway_loads_it() -> None:
    """vLLM's parsers read the environment when they are imported."""
    compat.prepare_environment(None)


JSON_CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
PYTHON_CALL = '[weather(city="Oslo", days=3)]'
QWEN_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK_V31_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_V3_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
MINIMAX_CALL = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
CALLS = {
    "deepseek_v3": DEEPSEEK_V3_CALL,
    "deepseek_v31": DEEPSEEK_V31_CALL,
    "ernie45": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "glm45": GLM_CALL,
    "glm47": GLM_CALL,
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "granite-20b-fc": f"<function_call> {JSON_CALL}",
    "granite4": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "hunyuan_a13b": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "internlm": f"<|action_start|><|plugin|>\n{JSON_CALL}<|action_end|>",
    "kimi_k2": KIMI_CALL,
    "lfm2": f"<|tool_call_start|>{PYTHON_CALL}<|tool_call_end|>",
    "ling3": GLM_CALL,
    "llama3_json": f"<|python_tag|>{JSON_CALL}",
    "llama4_json": f"<|python_tag|>{JSON_CALL}",
    "llama4_pythonic": PYTHON_CALL,
    "longcat": f"<longcat_tool_call>\n{JSON_CALL}\n</longcat_tool_call>",
    "mimo": (
        "<tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</tool_call>"
    ),
    "minimax_m2": MINIMAX_CALL,
    "olmo3": '<function_calls>weather(city="Oslo", days=3)</function_calls>',
    "poolside_v1": GLM_CALL,
    "pythonic": PYTHON_CALL,
    "qwen3_coder": QWEN_CALL,
    "qwen3_json": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3_xml": QWEN_CALL,
    "seed_oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
    ),
    "step3p5": QWEN_CALL,
    "xlam": f"[{JSON_CALL}]",
}
THOUGHTS = dict.fromkeys(
    (
        *("deepseek_r1", "glm45", "glm47", "holo2", "kimi_k2", "ling3", "mimo", "minimax_m2"),
        *("nemotron_v3", "qwen3", "step3p5", "deepseek_v4"),
    ),
    "<think>It rains.</think>Take a coat.",
) | {
    "seed_oss": "<seed:think>It rains.</seed:think>Take a coat.",
}
MARKS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<seed:think>",
        "</seed:think>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"),
    *("<|tool_call_start|>", "<|tool_call|>", "<|action_start|>", "<|plugin|>", "<|action_end|>"),
)
WEATHER = Tool(
    "weather",
    parameters='{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}}',
)


@cache
def tokenizer() -> Any:
    """The demo model's, with the marks of all formats added."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    made.add_tokens(list(MARKS))
    return made


def token_bytes(token: int) -> bytes:
    return str(tokenizer().decode([token])).encode()


@cache
def parsers_of(names: ParserNames) -> compat.Parsers:
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama"), hf_text_config=SimpleNamespace(model_type="llama")
    )
    return compat.Parsers(tokenizer(), model_config, token_bytes, names)


def request(choice: ToolChoice | None = None, tools: tuple[Tool, ...] = (WEATHER,)) -> EngineRequest:
    messages = (Message(Role.USER, "Shall I go out?"),)
    sampling = Sampling(max_tokens=100)
    work = Work("gen_1", (5,), messages, sampling, tools=tools, tool_choice=choice)
    return EngineRequest("gen_1", (5,), sampling, ResponseFormat(), chat=work)


def read(names: ParserNames, ids: Sequence[int], sizes: Iterator[int], ask: EngineRequest) -> AnswerFold:
    parsed = parsers_of(names).parsed(ask, None)
    assert parsed is not None
    fold, at = AnswerFold(), 0
    while at < len(ids):
        chunk = ids[at : at + next(sizes)]
        at += len(chunk)
        text = b"".join(map(token_bytes, chunk)).decode()
        ended = at == len(ids)
        for event in parsed.parser.take(0, text, chunk, finished=ended, whole=ended):
            fold.take(event)
    fold.end([parsed.reason(0, FinishReason.STOP)])
    return fold


def cuts(length: int) -> Iterator[Iterator[int]]:
    """One token at a time, two, three, eight, all at once; and twelve random cuts."""
    for size in (1, 2, 3, 8, length):
        yield iter([size] * length)
    rng = random.Random(length)
    for _ in range(12):
        yield iter([rng.randint(1, 6) for _ in range(length)])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_is_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(CALLS[name], add_special_tokens=False)
    for sizes in cuts(len(ids)):
        [call] = read(ParserNames(name), ids, sizes, request()).tool_calls()
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 3})


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_reasoning_is_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(THOUGHTS[name], add_special_tokens=False)
    for sizes in cuts(len(ids)):
        fold = read(ParserNames(reasoning=name), ids, sizes, request(tools=()))
        assert ((fold.reasoning() or "").strip(), fold.text().strip()) == ("It rains.", "Take a coat.")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (ToolChoice(ToolChoiceMode.REQUIRED), '[{"name": "weather", "parameters": {"city": "Oslo"}}]'),
        (ToolChoice(ToolChoiceMode.NAMED, "weather"), '{"city": "Oslo"}'),
        (
            ToolChoice(ToolChoiceMode.REQUIRED, allowed=("weather",)),
            '[{"name": "weather", "parameters": {}}]',
        ),
    ],
)
def test_a_call_that_must_be_is_bound_by_a_schema(choice: ToolChoice, text: str) -> None:
    asked = request(choice, (WEATHER, Tool("other", parameters='{"type":"object"}')))
    parsed = parsers_of(ParserNames("hermes")).parsed(asked, None)
    assert parsed is not None
    schema = json.dumps(parsed.grammar.json)
    assert "city" in schema
    assert ("other" in schema) is (choice.mode is ToolChoiceMode.REQUIRED and not choice.allowed)
    ids = tokenizer().encode(text, add_special_tokens=False)
    for sizes in cuts(len(ids)):
        [call] = read(ParserNames("hermes"), ids, sizes, asked).tool_calls()
        assert call.name == "weather" and json.loads(call.arguments) in ({"city": "Oslo"}, {})


def test_without_tools_or_reasoning_nothing_is_parsed() -> None:
    assert parsers_of(ParserNames("hermes")).parsed(request(tools=()), None) is None
    assert parsers_of(ParserNames()).parsed(request(), None) is None


def test_a_parser_that_the_tokenizer_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.tool_parser mistral"):
        parsers_of(ParserNames("mistral"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ParserNames("hermez"), "engine.tool_parser: 'hermez' is none of vLLM's; allowed: none, apertus"),
        (ParserNames("phi4_mini_json"), "engine.tool_parser: 'phi4_mini_json' misreads streams"),
        (ParserNames(reasoning="granite"), "engine.reasoning_parser: 'granite' misreads streams"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused_by_name(names: ParserNames, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parsers_of(names)
    assert str(caught.value).startswith(message)
