"""Structured output follows the requested grammar, whatever the model prefers."""

import gc
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.errors import InvalidGrammar
from engine.grammars import prepare_check
from engine.sequence import Sequence
from engine.structured import MASK_TOKEN_S, MAX_GRAMMARS, MAX_GRAMMARS_BYTES, Grammars, Matcher
from engine.values import GenerationRequest, GrammarKind, SamplingParams, SequenceEnd, StructuredOutput
from tests.engine.support import EOS, Answer, greedy, make_tokenizer, random_prompts, run_to_end
from tests.engine.test_engine import ScriptedRunner, scripted_engine

MakeEngine = Callable[..., Engine]
PROMPT = (10, 20, 30, 40, 50)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "日本", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

scalars = st.one_of(
    st.integers(0, 6).map(lambda longest: {"type": "string", "maxLength": longest}),
    st.integers(-20, 20).map(lambda least: {"type": "integer", "minimum": least, "maximum": least + 9}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x y"}, {"enum": [1, "é", None]}]),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "b", "長い"]), unique=True, max_size=3)
    return st.builds(
        lambda names, parts, required: {
            "type": "object",
            "properties": dict(zip(names, parts, strict=False)),
            "required": names[:required],
            "additionalProperties": False,
        },
        names,
        st.lists(values, min_size=3, max_size=3),
        st.integers(0, 3),
    )


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda one: {"type": "array", "items": one, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=4,
)
patterns = st.recursive(
    st.sampled_from(["a", "bc", "日", "[0-9]", "[a-cx]", "[^a]", "-", " "]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,3}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


def shaped(shape: GrammarKind, spec: object = "", **options: Any) -> SamplingParams:
    text = spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)
    return SamplingParams(
        **{"max_tokens": 120, "temperature": 1.0, "seed": 1, "structured": StructuredOutput(shape, text)}
        | options
    )


def answers(engine: Engine, *params: SamplingParams) -> list[Answer]:
    requests = [GenerationRequest(str(n), PROMPT, one) for n, one in enumerate(params)]
    return list(run_to_end(engine, requests).values())


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 1000))
def test_an_answer_that_ends_by_itself_fits_the_schema(engine: Engine, schema: Any, seed: int) -> None:
    for answer in answers(
        engine, *[shaped(GrammarKind.JSON_SCHEMA, schema, seed=seed + n) for n in range(3)]
    ):
        assert answer.finish_reason in (SequenceEnd.STOP, SequenceEnd.LENGTH)
        if answer.finish_reason is SequenceEnd.STOP:
            jsonschema.validate(json.loads(answer.text), schema)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=patterns, seed=st.integers(0, 1000))
def test_an_answer_that_ends_by_itself_matches_the_pattern(engine: Engine, pattern: str, seed: int) -> None:
    for answer in answers(engine, *[shaped(GrammarKind.REGEX, pattern, seed=seed + n) for n in range(3)]):
        assert answer.finish_reason in (SequenceEnd.STOP, SequenceEnd.LENGTH)
        if answer.finish_reason is SequenceEnd.STOP:
            assert re.fullmatch(pattern, answer.text), answer.text


def test_a_json_object_is_one_on_one_line(engine: Engine) -> None:
    ended = [
        answer.text
        for answer in answers(engine, *[shaped(GrammarKind.JSON_OBJECT, seed=seed) for seed in range(20)])
        if answer.finish_reason is SequenceEnd.STOP
    ]
    assert len(ended) > 5
    assert all(isinstance(json.loads(text), dict) and "\n" not in text for text in ended)


def test_a_choice_is_one_of_the_choices_and_each_can_come(engine: Engine) -> None:
    choices = ['yes "sir"', "no\\", "漫画 😀"]
    said = answers(engine, *[shaped(GrammarKind.CHOICE, choices, seed=seed) for seed in range(60)])
    assert {answer.finish_reason for answer in said} == {SequenceEnd.STOP}
    assert {answer.text for answer in said} == set(choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" root ")" | "x"',
        'start: "(" start ")" | "x"',
    ],
)
def test_a_grammar_in_either_notation_is_followed(engine: Engine, grammar: str) -> None:
    for answer in answers(engine, *[shaped(GrammarKind.GRAMMAR, grammar, seed=seed) for seed in range(8)]):
        depth = len(answer.text) // 2
        if answer.finish_reason is SequenceEnd.STOP:
            assert answer.text == "(" * depth + "x" + ")" * depth


def test_max_tokens_may_leave_it_incomplete(engine: Engine) -> None:
    [answer] = answers(engine, shaped(GrammarKind.JSON_SCHEMA, PERSON, max_tokens=4))
    assert answer.finish_reason is SequenceEnd.LENGTH
    assert len(answer.token_ids) == 4
    assert answer.text.startswith("{")


def test_an_answer_ends_where_the_grammar_ends_even_when_the_end_token_is_ignored(engine: Engine) -> None:
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 9}):
        [answer] = answers(engine, shaped(GrammarKind.REGEX, "ab", **options))
        assert (answer.text, answer.finish_reason) == ("ab", SequenceEnd.STOP)


def test_before_min_tokens_a_stop_id_is_sampled_where_the_grammar_allows_nothing_else(engine: Engine) -> None:
    [end] = make_tokenizer().encode("x").ids
    options = {"min_tokens": 3, "stop_token_ids": (end,)}
    [needed, avoided] = answers(
        engine,
        shaped(GrammarKind.REGEX, "x", **options),
        shaped(GrammarKind.CHOICE, ["x", "yes"], **options),
    )
    assert (needed.token_ids, needed.finish_reason) == ([end], SequenceEnd.STOP)
    assert avoided.text == "yes"


def test_an_empty_text_is_an_answer_when_the_pattern_says_so(engine: Engine) -> None:
    [answer] = answers(engine, shaped(GrammarKind.REGEX, ""))
    assert (answer.text, answer.finish_reason) == ("", SequenceEnd.STOP)


@pytest.mark.parametrize(
    ("shape", "spec", "problem"),
    [
        (GrammarKind.REGEX, "[a-", "unclosed character class"),
        (GrammarKind.REGEX, r"(a)\1", "backreferences are not supported"),
        (GrammarKind.JSON_SCHEMA, '{"type": "wish"}', "Invalid type: wish"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
        (GrammarKind.JSON_SCHEMA, "[1]", "object"),
        (GrammarKind.JSON_SCHEMA, "{", "Expecting"),
        (GrammarKind.JSON_SCHEMA, "[" * 60_000, "recursion"),
        (GrammarKind.GRAMMAR, "root ::= missing", "missing"),
        (GrammarKind.GRAMMAR, "start: missing", "missing"),
        (GrammarKind.GRAMMAR, "nonsense", ""),
    ],
)
def test_an_invalid_grammar_ends_its_request_alone_and_names_the_problem(
    engine: Engine, shape: GrammarKind, spec: str, problem: str
) -> None:
    bad, good, plain = answers(
        engine, shaped(shape, spec), shaped(GrammarKind.CHOICE, ["yes"]), greedy(5, ignore_eos=True)
    )
    assert bad.last is not None and bad.last.detail is not None
    assert (bad.finish_reason, bad.last.error) == (SequenceEnd.ERROR, "invalid_grammar")
    assert f"the {shape.value} is not valid" in bad.last.detail and problem in bad.last.detail
    assert "\n" not in bad.last.detail and len(bad.last.detail) < 400
    assert (good.text, len(plain.token_ids)) == ("yes", 5)


def test_requests_refused_for_the_same_shape_leave_nothing_in_memory(engine: Engine) -> None:
    def sequences() -> int:
        gc.collect()
        return sum(type(one) is Sequence for one in gc.get_objects())

    before = sequences()
    for _ in range(3):
        [answer] = answers(engine, shaped(GrammarKind.REGEX, "(never built"))
        assert answer.finish_reason is SequenceEnd.ERROR
    assert sequences() == before


def test_preemptions_do_not_change_a_structured_answer(make_engine: MakeEngine) -> None:
    requests = [
        GenerationRequest(str(n), prompt, shaped(GrammarKind.JSON_SCHEMA, PERSON, seed=n, max_tokens=60))
        for n, prompt in enumerate(random_prompts(20, 512, longest=60))
    ]
    roomy, tight = make_engine(), make_engine(num_blocks=12)
    expected = run_to_end(roomy, requests)
    preempted = run_to_end(tight, requests)
    assert tight.signals.preemptions > 3
    for name, answer in preempted.items():
        assert (answer.token_ids, answer.text) == (expected[name].token_ids, expected[name].text)
        if answer.finish_reason is SequenceEnd.STOP:
            jsonschema.validate(json.loads(answer.text), PERSON)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "the json_schema is not valid: no answer can match it"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, r"[^<>]*too complex to follow[^<>]*"),
    ],
)
def test_a_schema_that_refers_to_itself_alone_is_refused_in_words_for_its_author(
    schema: object, said: str
) -> None:
    check = prepare_check("models/demo/tokenizer.json")
    answer = json.loads(check(json.dumps(["json_schema", json.dumps(schema)]).encode()))
    assert re.fullmatch(said, answer["problem"])


def test_penalties_and_bias_cannot_break_the_shape(engine: Engine) -> None:
    pushed = shaped(
        GrammarKind.CHOICE,
        ["yes", "no"],
        logit_bias=((300, 100.0),),
        repetition_penalty=5.0,
        presence_penalty=2.0,
    )
    assert {answer.text for answer in answers(engine, *[pushed] * 3)} <= {"yes", "no"}


def test_a_token_that_the_grammar_does_not_know_ends_its_request_alone() -> None:
    engine = scripted_engine(ScriptedRunner([300, 301, EOS]))
    shaped_one, plain = answers(engine, shaped(GrammarKind.REGEX, "[0-9]{4}"), greedy(5))
    assert shaped_one.last is not None
    assert (shaped_one.finish_reason, shaped_one.last.error) == (SequenceEnd.ERROR, "invalid_grammar")
    assert plain.token_ids == [300, 301, EOS]


def test_a_request_may_leave_while_its_grammar_is_built(engine: Engine) -> None:
    engine.add(GenerationRequest("a", PROMPT, shaped(GrammarKind.REGEX, "leaving{1,50}")))
    assert engine.signals.waiting == 1
    assert engine.abort("a")
    assert not engine.has_work and engine.signals.waiting == 0
    engine.check_integrity()


def test_a_shape_is_built_once_and_the_longest_unused_is_forgotten() -> None:
    grammars = Grammars(make_tokenizer(), 512, (EOS,))
    shapes = [StructuredOutput(GrammarKind.REGEX, "a" * (n + 1)) for n in range(MAX_GRAMMARS + 1)]
    first, second = (grammars.build(shape) for shape in shapes[:2])
    assert grammars.build(shapes[0]) is first
    for shape in shapes[2:]:
        grammars.build(shape)
    assert grammars.build(shapes[0]) is first
    assert grammars.build(shapes[1]) is not second


def test_a_grammar_that_grows_too_complex_on_its_way_says_so() -> None:
    tokenizer = make_tokenizer()
    grammars = Grammars(tokenizer, 512, (EOS,))
    matcher = Matcher(grammars.build(StructuredOutput(GrammarKind.REGEX, "(.{0,500}x){0,500}")).result())
    with pytest.raises(InvalidGrammar, match=r"too complex.*too many"):
        for token in tokenizer.encode("there is no x in x-ray " * 100).ids:
            matcher.allowed()
            matcher.accept(token)


def test_a_text_whose_masks_are_slow_ends_before_the_batch_waits_longer() -> None:
    processor_s = iter(range(1_000))
    grammar = (
        Grammars(make_tokenizer(), 512, (EOS,)).build(StructuredOutput(GrammarKind.REGEX, "a*")).result()
    )
    slow = Matcher(grammar, clock=lambda: next(processor_s))
    slow.allowed()
    with pytest.raises(
        InvalidGrammar, match=r"too slow to follow: its masks took 0\.5 s more than 0\.01 s a token"
    ):
        slow.accept(0)
    moderate = Matcher(grammar, clock=lambda: next(processor_s) * MASK_TOKEN_S)
    [letter] = make_tokenizer().encode("a").ids
    for _ in range(200):
        moderate.allowed()
        assert not moderate.accept(letter)


def test_grammars_are_forgotten_by_their_memory_too() -> None:
    grammars = Grammars(make_tokenizer(), 512, (EOS,))
    third = MAX_GRAMMARS_BYTES // 3
    shapes = [StructuredOutput(GrammarKind.REGEX, "a" * (n + 1), third) for n in range(4)]
    built = [grammars.build(shape) for shape in shapes]
    assert [grammars.build(shape) is one for shape, one in zip(shapes[1:], built[1:], strict=True)] == [
        True
    ] * 3
    assert grammars.build(shapes[0]) is not built[0]
    alone = StructuredOutput(GrammarKind.REGEX, "b", 2 * MAX_GRAMMARS_BYTES)
    assert grammars.build(alone) is grammars.build(alone)


def test_a_model_without_an_end_token_refuses_structured_output() -> None:
    built = Grammars(make_tokenizer(), 512, ()).build(StructuredOutput(GrammarKind.JSON_OBJECT))
    with pytest.raises(InvalidGrammar, match="this model"):
        built.result()
