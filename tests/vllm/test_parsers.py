"""vLLM's parsers of tool calls and reasoning, as a library: results do not depend on the pieces."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role, Tool, ToolChoice, ToolChoiceMode
from engine.errors import InvalidConfig
from gateway.backends.port import PartialAnswer, Work
from gateway.backends.vllm.answer_parser import AnswerParser
from gateway.backends.vllm.compat import parsers, start
from gateway.backends.vllm.parser_names import ParserNames
from gateway.contracts.events import AnswerFold, Delta
from gateway.contracts.values import FinishReason, FormatType, ResponseFormat, Sampling
from gateway.generation.resume import EventSplice
from resilience.failures import CannotResume
from tests.conformance.harness import DEMO_MODEL, REPOSITORY, demo_tokenizer
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module", autouse=True)
def as_the_gateway_loads_it() -> None:
    """Prepares the environment, which vLLM's parsers read when they are imported."""
    start.prepare_environment(None)


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
MINIMAX = "]<]minimax[>["


def dsml(wrapper: str, space: str = "") -> str:
    """A call in DeepSeek's format; the tags of version 4.1 have a space."""
    tag = f"｜DSML｜{space}"
    return (
        f'<{tag}{wrapper}>\n<{tag}invoke name="weather">\n'
        f'<{tag}parameter name="city" string="true">Oslo</{tag}parameter>\n'
        f'<{tag}parameter name="days" string="false">3</{tag}parameter>\n'
        f"</{tag}invoke>\n</{tag}{wrapper}>"
    )


def plamo(mark: str) -> str:
    return f"<|plamo:{mark}:plamo|>"


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
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Oslo", "days": 3}}]<|tools_suffix|>',
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "dots": (
        '<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</dots_function_call>'
    ),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "gigachat3": f"<|function_call|>{JSON_CALL}",
    "hf": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "hy_v3": (
        "<tool_calls><tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call></tool_calls>"
    ),
    "hy_v4": (
        "<tool_calls><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call></tool_calls>"
    ),
    "inkling": (
        "<|message_model|><|content_invoke_tool_json|>"
        '{"name":"weather","args":{"city":"Oslo","days":3}}<|end_message|>'
    ),
    "k2_horizon": (
        "<ifm|tool_calls>\n<ifm|tool_call>weather\n"
        "<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Oslo</ifm|arg_value>\n"
        "<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>3</ifm|arg_value>\n"
        "</ifm|tool_call>\n</ifm|tool_calls>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "minicpm5": (
        '<function name="weather"><param name="city">Oslo</param><param name="days">3</param></function>'
    ),
    "minimax_m3": (
        f'{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="weather">\n{MINIMAX}<city>Oslo{MINIMAX}</city>\n'
        f"{MINIMAX}<days>3{MINIMAX}</days>\n{MINIMAX}</invoke>\n{MINIMAX}</tool_call>"
    ),
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}',
    "muse_glimmer": (
        ' to=weather<|message|>\n<atem:function_calls>\n<atem:invoke name="weather">\n'
        '<atem:parameter name="city">Oslo</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|>"
    ),
    "plamo3": (
        f"{plamo('begin_tool_requests')}{plamo('begin_tool_request')}"
        f"{plamo('begin_tool_name')}weather{plamo('end_tool_name')}"
        f"{plamo('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"
        f'{{"city": "Oslo", "days": 3}}{plamo("end_tool_arguments")}'
        f"{plamo('end_tool_request')}{plamo('end_tool_requests')}"
    ),
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather"><steptml:parameter name="city">Oslo</steptml:parameter>'
        '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "xlam": f"[{JSON_CALL}]",
}
# Text before, after and between parallel calls. In other formats, whole calls follow each other.
WRAPPERS = {
    "apertus": ("<|tools_prefix|>[", "]<|tools_suffix|>", ", "),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "")),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n"),
    "deepseek_v4": ("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>", "\n"),
    "deepseek_v41": ("<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>", "\n"),
    "dots": ("<dots_function_call>\n", "\n</dots_function_call>", "\n"),
    "granite": ("<|tool_call|>[", "]", ", "),
    "hunyuan_a13b": ("<tool_calls>[", "]</tool_calls>", ", "),
    **dict.fromkeys(("hy_v3", "hy_v4"), ("<tool_calls>", "</tool_calls>", "")),
    "k2_horizon": ("<ifm|tool_calls>\n", "\n</ifm|tool_calls>", "\n"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", ""),
    "kimi_k3": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", ""),
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    **dict.fromkeys(("llama3_json", "llama4_json"), ("<|python_tag|>", "", "; ")),
    **dict.fromkeys(("llama4_pythonic", "pythonic", "xlam"), ("[", "]", ", ")),
    "minimax_m2": ("<minimax:tool_call>\n", "\n</minimax:tool_call>", "\n"),
    "minimax_m3": (f"{MINIMAX}<tool_call>\n", f"\n{MINIMAX}</tool_call>", "\n"),
    "olmo3": ("<function_calls>", "</function_calls>", "\n"),
    "plamo3": (plamo("begin_tool_requests"), plamo("end_tool_requests"), ""),
    "step3": ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", ""),
}
# Formats that allow only one call.
ONE_CALL = {"gigachat3", "internlm"}
# Replacements that turn the first of two calls into the second, in each format.
SECOND_CALL = (
    *(("Oslo", "Bergen"), ("weather:0", "weather:1"), ('index="1"', 'index="2"')),
    *(("=3", "=4"), (": 3", ": 4"), (":3", ":4"), (">3<", ">4<"), (">3]", ">4]"), ("\n3\n", "\n4\n")),
)
# Parsers that read the bytes or tokens of their model's vocabulary, which the tests do not have.
UNREAD_TOOLS = {"cohere_command3", "cohere_command4", "openai"}
UNREAD_REASONING = {"cohere_command3", "cohere_command4", "hunyuan_a13b", "openai_gptoss"}
THOUGHTS = dict.fromkeys(
    (
        *("deepseek_r1", "glm45", "glm47", "holo2", "kimi_k2", "ling3", "mimo", "minimax_m2"),
        *("nemotron_v3", "qwen3", "step3p5", "deepseek_v4", "deepseek_v3", "deepseek_v41", "hf", "hy_v3"),
        *("hy_v4", "granite_thinking_parser", "minicpmv", "olmo3", "poolside_v1"),
    ),
    "<think>It rains.</think>Take a coat.",
) | {
    "gemma4": "<|channel>thought\nIt rains.<channel|>Take a coat.",
    "inkling": (
        "<|message_model|><|content_thinking|>It rains.<|end_message|>"
        "<|message_model|><|content_text|>Take a coat.<|end_message|>"
    ),
    "k2_horizon": "<ifm|think>It rains.</ifm|think>Take a coat.",
    "kimi_k3": (
        "<|open|>think<|sep|>It rains.<|close|>think<|sep|>"
        "<|open|>response<|sep|>Take a coat.<|close|>response<|sep|>"
    ),
    "minimax_m3": "<mm:think>It rains.</mm:think>Take a coat.",
    "mistral": "[THINK]It rains.[/THINK]Take a coat.",
    "muse_glimmer": (
        " to=self<|message|>It rains.<|eom|><|start|>assistant to=user<|message|>Take a coat.<|eot|>"
    ),
    "plamo3": f"{plamo('begin_think')}It rains.{plamo('end_think')}Take a coat.",
    "seed_oss": "<seed:think>It rains.</seed:think>Take a coat.",
    "step3": "It rains.</think>Take a coat.",
}
# Parsers that leave the reasoning in the text.
AS_TEXT = {"minimax_m2_append_think": "It rains.</think>Take a coat."}
# The only reasoning parser that leaves marks in the text without the tool parser of its model.
NEEDS_TOOL_PARSER = {"inkling"}
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
    *("<|tools_prefix|>", "<|tools_suffix|>", "｜DSML｜", "<dots_function_call>", "</dots_function_call>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|function_call|>"),
    *("<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|message_model|>"),
    *("<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
    *("<|content_invoke_tool_text|>", "<|content_tool_error|>", "<|content_model_end_sampling|>"),
    *("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", "</ifm|tool_call>", "<ifm|arg_key>"),
    *("</ifm|arg_key>", "<ifm|arg_value>", "</ifm|arg_value>", "<ifm|think>", "</ifm|think>"),
    *("<|open|>", "<|close|>", "<|sep|>", MINIMAX, "<mm:think>", "</mm:think>", "[TOOL_CALLS]", "[ARGS]"),
    *("[THINK]", "[/THINK]", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|plamo:begin_"),
    *("<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>", "<assistant>"),
    *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    *("<｜tool_calls_end｜>", "<function", "</function>", "<param", "</param>", "Ġ</", "</", "think", ">"),
)
# For the parsers ``hf``, which read the format that the tokenizer's files describe.
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
WEATHER = Tool(
    "weather",
    parameters='{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}}',
)


@cache
def tokenizer() -> Any:
    """The demo model's tokenizer, with the marks of all formats added."""
    from transformers import AutoTokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer

    made = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    made.add_tokens(list(MARKS))
    made.init_kwargs["response_template"] = RESPONSE_TEMPLATE
    return get_cached_tokenizer(made)  # as vLLM's own: each new parser asks for the whole vocabulary


@cache
def plain_tokenizer() -> ChatTokenizer:
    return demo_tokenizer()


def token_bytes(token: int) -> bytes:
    return plain_tokenizer().token_bytes(token) or str(tokenizer().decode([token])).encode()


@cache
def parsers_of(names: ParserNames) -> parsers.Parsers:
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama"), hf_text_config=SimpleNamespace(model_type="llama")
    )
    return parsers.Parsers(tokenizer(), model_config, token_bytes, names)


def request(
    choice: ToolChoice | None = None,
    tools: tuple[Tool, ...] = (WEATHER,),
    effort: str | None = None,
    stop: tuple[str, ...] = (),
) -> Work:
    messages = (Message(Role.USER, "Shall I go out?"),)
    sampling = Sampling(max_tokens=100, stop=stop)
    return Work("gen_1", (5,), messages, sampling, tools=tools, tool_choice=choice, reasoning_effort=effort)


def read(
    names: ParserNames,
    ids: Sequence[int],
    sizes: Iterator[int],
    ask: Work,
    reason: FinishReason = FinishReason.STOP,
    *,
    stopped: bool = False,
) -> AnswerFold:
    parsed = parsers_of(names).parsed(ask, None)
    assert parsed is not None
    fold, at = AnswerFold(), 0
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    # vLLM holds back what may be the beginning of a stop string.
    longest, held = max(map(len, ask.sampling.stop), default=1) - 1, ""
    while at < len(ids):
        chunk = ids[at : at + next(sizes)]
        at += len(chunk)
        text = held + decoder.decode(b"".join(map(token_bytes, chunk)))
        ended = at == len(ids)
        given = len(text) if ended else max(0, len(text) - longest)
        text, held = text[:given], text[given:]
        whole = ended and reason is FinishReason.STOP
        events = parsed.take(0, text, chunk, finished=ended, whole=whole, stopped=ended and stopped)
        for event in events:
            fold.take(event)
    fold.end([parsed.reason(0, reason)])
    return fold


def cuts(length: int) -> Iterator[Iterator[int]]:
    """Sizes of an answer's pieces: one token, three, all at once; and two random cuts."""
    for size in (1, 3, length):
        yield iter([size] * length)
    rng = random.Random(length)
    for _ in range(2):
        yield iter([rng.randint(1, 6) for _ in range(length)])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_is_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(CALLS[name], add_special_tokens=False)
    for sizes in cuts(len(ids)):
        [call] = read(ParserNames(name), ids, sizes, request()).tool_calls()
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 3})


@pytest.mark.parametrize("name", ["deepseek_v31", "hermes"])
def test_a_call_is_the_same_if_a_piece_ends_inside_a_character(name: str) -> None:
    ids = tokenizer().encode(CALLS[name].replace("Oslo", "髙 😀"), add_special_tokens=False)
    for cut in range(1, len(ids)):
        fold = read(ParserNames(name), ids, iter([cut, len(ids)]), request())
        [call] = fold.tool_calls()
        assert (json.loads(call.arguments), fold.text()) == ({"city": "髙 😀", "days": 3}, ""), cut


@pytest.mark.parametrize(
    ("names", "thought"),
    [
        (ParserNames("hermes", "qwen3"), "<think>It rains.</think>"),
        (ParserNames("glm45", "glm45"), "<think>It rains.</think>"),
        (ParserNames("deepseek_v31", "deepseek_r1"), "<think>It rains.</think>"),
        (ParserNames("mistral", "mistral"), "[THINK]It rains.[/THINK]"),
        (ParserNames("internlm"), ""),
    ],
    ids=lambda value: value.tool if isinstance(value, ParserNames) else "",
)
def test_an_answer_is_read_the_same_if_its_request_has_stop_strings(names: ParserNames, thought: str) -> None:
    assert names.tool is not None
    ids = tokenizer().encode(thought + CALLS[names.tool], add_special_tokens=False)
    asked = request(effort="high" if names.reasoning else None, stop=("\nObservation:",))
    for sizes in cuts(len(ids)):
        fold = read(names, ids, sizes, asked)
        [call] = fold.tool_calls()
        assert json.loads(call.arguments) == {"city": "Oslo", "days": 3}
        assert (fold.reasoning(), fold.text()) == ("It rains." if thought else None, "")


@pytest.mark.parametrize("name", ["glm45", "gemma4", "kimi_k2", "qwen3_coder"])
def test_a_call_inside_reasoning_is_read_however_the_answer_is_cut(name: str) -> None:
    reasoning = "qwen3" if name == "qwen3_coder" else name
    end = THOUGHTS[reasoning].index("It rains.") + len("It rains.")
    text = THOUGHTS[reasoning][:end] + CALLS[name] + THOUGHTS[reasoning][end:]
    ids = tokenizer().encode(text, add_special_tokens=False)
    for sizes in cuts(len(ids)):
        fold = read(ParserNames(name, reasoning), ids, sizes, request(effort="high"))
        assert [json.loads(call.arguments) for call in fold.tool_calls()] == [{"city": "Oslo", "days": 3}]
        assert (fold.reasoning(), CALLS[name][:12] in fold.text()) == ("It rains.", False)


def two_calls(name: str) -> str:
    first, last, between = WRAPPERS.get(name, ("", "", ""))
    one = two = CALLS[name].removeprefix(first).removesuffix(last)
    for given, other in SECOND_CALL:
        two = two.replace(given, other)
    return f"{first}{one}{between}{two}{last}"


@pytest.mark.parametrize("name", sorted(set(CALLS) - ONE_CALL))
def test_parallel_calls_are_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(two_calls(name), add_special_tokens=False)
    for size in (1, len(ids)):
        calls = read(ParserNames(name), ids, iter([size] * len(ids)), request()).tool_calls()
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("weather", {"city": "Oslo", "days": 3}),
            ("weather", {"city": "Bergen", "days": 4}),
        ]
        assert len({call.id for call in calls}) == 2


REQUIRED = '[{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}]'
NAMED = '{"city": "Oslo", "days": 3}'


@pytest.mark.parametrize(
    ("name", "choice", "text"),
    [
        *[(name, None, CALLS[name]) for name in sorted(CALLS)],
        *[
            (name, choice, text)
            for name in ("hermes", "llama3_json", "mistral", "qwen3_json", "xlam")
            for choice, text in (
                (ToolChoice(ToolChoiceMode.REQUIRED), REQUIRED),
                (ToolChoice(ToolChoiceMode.NAMED, "weather"), NAMED),
            )
        ],
    ],
    ids=lambda value: value.mode.value if isinstance(value, ToolChoice) else value and value[:14],
)
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP], ids=["length", "stop string"])
def test_a_call_that_is_cut_ends_its_answer_without_half_a_name(
    name: str, choice: ToolChoice | None, text: str, reason: FinishReason
) -> None:
    ids, asked = tokenizer().encode(text, add_special_tokens=False), request(choice)
    for cut in sorted({2, len(ids) // 2, len(ids) - 1}):
        for size in (2, cut):
            stopped = reason is FinishReason.STOP
            fold = read(ParserNames(name), ids[:cut], iter([size] * cut), asked, reason, stopped=stopped)
            assert [call.name for call in fold.tool_calls()] in ([], ["weather"]), cut


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_reasoning_is_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(THOUGHTS[name], add_special_tokens=False)
    names = ParserNames(name if name in NEEDS_TOOL_PARSER else None, name)
    for sizes in cuts(len(ids)):
        # Some parsers read reasoning only if the chat template was told to ask for it.
        fold = read(names, ids, sizes, request(tools=(), effort="high"))
        assert ((fold.reasoning() or "").strip(), fold.text().strip()) == ("It rains.", "Take a coat.")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (ParserNames("hermes", "qwen3"), f"<think>It rains — 髙.</think>So: {CALLS['hermes']}"),
        (ParserNames("qwen3_coder", "qwen3"), f"<think>It rains — 髙.</think>{QWEN_CALL}"),
        (ParserNames("glm45", "glm45"), f"<think>It rains — 髙.</think>{GLM_CALL}"),
        (ParserNames("mistral", "mistral"), f"[THINK]It rains — 髙.[/THINK]{CALLS['mistral']}"),
    ],
    ids=lambda value: value.tool if isinstance(value, ParserNames) else "",
)
def test_an_answer_that_breaks_after_any_token_is_joined_to_the_rest_of_another_parser(
    names: ParserNames, text: str
) -> None:
    ids, ask = tokenizer().encode(text, add_special_tokens=False), request(effort="high")
    whole = read(names, ids, iter([len(ids)]), ask)
    assert "髙" in (whole.reasoning() or "") and whole.tool_calls()

    def pieces(parser: AnswerParser, start: int, end: int) -> Iterator[Delta]:
        """The events of vLLM's outputs: a token that ends inside a character has no text."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        decoder.decode(b"".join(map(token_bytes, ids[:start])))
        for at in range(start, end):
            ended = at == len(ids) - 1
            text = decoder.decode(token_bytes(ids[at]))
            yield from parser.take(0, text, [ids[at]], finished=ended, whole=ended)

    for cut in range(1, len(ids)):
        first, second = (parsers_of(names).parsed(ask, None) for _ in range(2))
        assert first is not None and second is not None
        fold, delivered = AnswerFold(), ""
        for event in pieces(first, 0, cut):
            fold.take(event)
            delivered += event.text if type(event) is Delta else ""
        splice = EventSplice(delivered, fold)
        again = [*second.rest(ids[:cut], None), *pieces(second, cut, len(ids))]
        for event in again:
            fold.take(splice.take(event))
        splice.end()
        fold.end([second.reason(0, FinishReason.STOP)])
        assert (fold.reasoning(), fold.text()) == (whole.reasoning(), whole.text()), cut
        assert [(call.name, call.arguments) for call in fold.tool_calls()] == [
            (call.name, call.arguments) for call in whole.tool_calls()
        ]


@pytest.mark.parametrize("name", sorted(AS_TEXT))
def test_reasoning_that_a_parser_gives_as_text_is_the_same_however_the_answer_is_cut(name: str) -> None:
    ids = tokenizer().encode(AS_TEXT[name], add_special_tokens=False)
    for sizes in cuts(len(ids)):
        fold = read(ParserNames(reasoning=name), ids, sizes, request(tools=()))
        assert (fold.reasoning(), fold.text()) == (None, f"<think>{AS_TEXT[name]}")


def test_every_parser_of_vllm_is_read_refused_or_listed_with_a_reason() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    found = {*CALLS, *parsers.MISREADING_TOOLS, *UNREAD_TOOLS}
    assert set(ToolParserManager.list_registered()) == found
    found = {*THOUGHTS, *AS_TEXT, *parsers.MISREADING_REASONING, *UNREAD_REASONING}
    assert set(ReasoningParserManager.list_registered()) == found


def test_the_documents_table_has_every_parser_in_its_row() -> None:
    document = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")
    table = document.partition("## vLLM's parsers")[2].partition("\n## ")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "`" in line]
    columns = [[set(re.findall("`([^`]+)`", line[place])) for line in lines] for place in (1, 2)]

    def rows(makes: Callable[[str], ParserNames], names: Iterable[str]) -> list[set[str]]:
        single = {name for name in names if parsers_of(makes(name)).singly}
        return [set(names) - single, single]

    tools = [*rows(ParserNames, CALLS), set(parsers.MISREADING_TOOLS), UNREAD_TOOLS]
    reasoning = rows(lambda name: ParserNames(reasoning=name), [*THOUGHTS, *AS_TEXT])
    assert columns == [tools, [*reasoning, set(parsers.MISREADING_REASONING), UNREAD_REASONING]]


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
def test_a_required_call_is_constrained_by_a_schema(choice: ToolChoice, text: str) -> None:
    asked = request(choice, (WEATHER, Tool("other", parameters='{"type":"object"}')))
    parsed = parsers_of(ParserNames("hermes")).parsed(asked, None)
    assert parsed is not None
    schema = json.dumps(parsed.request.structured_outputs.json)
    assert "city" in schema
    assert ("other" in schema) is (choice.mode is ToolChoiceMode.REQUIRED and not choice.allowed)
    ids = tokenizer().encode(text, add_special_tokens=False)
    for sizes in cuts(len(ids)):
        [call] = read(ParserNames("hermes"), ids, sizes, asked).tool_calls()
        assert call.name == "weather" and json.loads(call.arguments) in ({"city": "Oslo"}, {})


@pytest.mark.parametrize(
    "parameters", [None, "{}", '{"description":"x"}', '{"anyOf":[{},{"type":"string"}]}']
)
@pytest.mark.parametrize(
    "choice", [ToolChoice(ToolChoiceMode.REQUIRED), ToolChoice(ToolChoiceMode.NAMED, "now")]
)
def test_the_arguments_of_a_required_call_are_an_object_whatever_the_tools_schema_leaves_open(
    parameters: str | None, choice: ToolChoice
) -> None:
    parsed = parsers_of(ParserNames("hermes")).parsed(
        request(choice, (Tool("now", parameters=parameters),)), None
    )
    assert parsed is not None
    schema = parsed.request.structured_outputs.json
    if choice.mode is ToolChoiceMode.REQUIRED:
        schema = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert schema["type"] == "object"
    assert parsed.request.tools[0].function.strict, "a parser with structural tags takes any JSON otherwise"


@pytest.mark.parametrize(
    ("choice", "warned"), [(None, True), (ToolChoice(), True), (ToolChoice(ToolChoiceMode.REQUIRED), False)]
)
def test_a_parser_without_structural_tags_warns_that_the_form_of_an_answer_forbids_calls(
    choice: ToolChoice | None, warned: bool
) -> None:
    shape = ResponseFormat(FormatType.JSON_OBJECT)
    asked = structs.replace(request(choice), response_format=shape)
    from vllm.sampling_params import StructuredOutputsParams

    parsed = parsers_of(ParserNames("hermes")).parsed(asked, StructuredOutputsParams(json={"type": "object"}))
    assert parsed is not None
    assert bool(parsed.warnings) is warned


def test_a_call_that_a_grammar_constrains_is_not_resumed() -> None:
    required = request(ToolChoice(ToolChoiceMode.REQUIRED))
    begun = structs.replace(required, partial=PartialAnswer("Let", (300,)))
    with pytest.raises(CannotResume):
        parsers_of(ParserNames("hermes")).parsed(begun, None)


def test_without_tools_or_reasoning_nothing_is_parsed() -> None:
    assert parsers_of(ParserNames("hermes")).parsed(request(tools=()), None) is None
    assert parsers_of(ParserNames()).parsed(request(), None) is None


def test_a_parser_that_the_tokenizer_does_not_fit_is_named() -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    with pytest.raises(InvalidConfig, match=r"engine\.tool_parser mistral"):
        parsers.parser_class(ParserNames("mistral"), plain, "llama")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ParserNames("hermez"), "engine.tool_parser: 'hermez' is none of vLLM's; allowed: none, apertus"),
        (ParserNames("phi4_mini_json"), "engine.tool_parser: 'phi4_mini_json' misreads streams"),
        (ParserNames("openai"), "vLLM's parser openai reads gpt_oss models alone, not 'llama'"),
        (ParserNames(reasoning="granite"), "engine.reasoning_parser: 'granite' misreads streams"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused_by_name(names: ParserNames, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parsers_of(names)
    assert str(caught.value).startswith(message)
