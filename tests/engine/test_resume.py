"""An answer that is resumed at any of its tokens is the same as the answer of one call."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.errors import PromptTooLong, UnknownToken
from engine.limits import check_request
from engine.text import StopStrings, text_of
from engine.values import GenerationRequest, GrammarKind, SamplingParams, SequenceEnd, StructuredOutput
from engine.wire import Add, Command, FrameReader, encode
from tests.engine.conftest import MakeEngine
from tests.engine.support import DEMO_MODEL, Answer, greedy, make_info, make_tokenizer, run_to_end

PROMPT = tuple(range(3, 60))
SPREAD = "新しい髙い漫画😀が、入荷しました。"  # most of its characters take several tokens
SCHEMA = {
    "type": "object",
    "properties": {"title": {"enum": ["Vagabond", "新しい漫画"]}, "volumes": {"type": "integer"}},
    "required": ["title", "volumes"],
    "additionalProperties": False,
}
SAMPLED = SamplingParams(max_tokens=20, temperature=1.1, top_p=0.95, top_k=40, seed=11, ignore_eos=True)
WAYS = {
    "greedy": greedy(20),
    "sampled": SAMPLED,
    "penalized": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "biased": greedy(20, ignore_eos=True, frequency_penalty=1.5, logit_bias=((70, 6.0), (71, 5.0))),
    "schema": SamplingParams(
        max_tokens=60,
        temperature=1.0,
        seed=3,
        structured=StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ),
    "spread": greedy(200, structured=StructuredOutput(GrammarKind.CHOICE, json.dumps([SPREAD]))),
}


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def whole(engine: Engine, sampling: SamplingParams) -> Answer:
    return run_to_end(engine, [GenerationRequest("whole", PROMPT, sampling)])["whole"]


def at_every_split(engine: Engine, first: Answer, sampling: SamplingParams) -> dict[int, Answer]:
    """Returns the rest of the answer ``first``, resumed at each of its tokens, all in one batch."""
    requests = [
        GenerationRequest(
            str(split),
            PROMPT,
            replace(sampling, max_tokens=sampling.max_tokens - split),
            partial_token_ids=tuple(first.token_ids[:split]),
        )
        for split in range(len(first.token_ids))
    ]
    return {int(name): answer for name, answer in run_to_end(engine, requests).items()}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_resumed_at_any_token_ends_as_the_whole_answer(
    engine: Engine, tokenizer: Tokenizer, way: str
) -> None:
    sampling = WAYS[way]
    first = whole(engine, sampling)
    assert len(first.token_ids) > 8
    for split, rest in at_every_split(engine, first, sampling).items():
        assert rest.token_ids == first.token_ids[split:], split
        assert text_of(tokenizer, first.token_ids[:split]) + rest.text == first.text, split
        assert rest.finish_reason == first.finish_reason
        assert rest.last is not None
        assert rest.last.output_tokens == len(first.token_ids) - split
        assert rest.last.prompt_tokens == len(PROMPT)
        assert rest.last.cached_tokens <= len(PROMPT)
        assert rest.last.queue_wait_s is not None


def test_characters_that_a_break_tears_apart_are_given_whole(engine: Engine) -> None:
    first = whole(engine, WAYS["spread"])
    assert first.text == SPREAD
    torn = [rest for rest in at_every_split(engine, first, WAYS["spread"]).values() if "\ufffd" in rest.text]
    assert not torn


def test_a_stop_string_that_began_before_the_break_ends_the_rest(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    shape = StructuredOutput(GrammarKind.CHOICE, json.dumps(["The reader asked which volume comes next"]))
    sampling = greedy(100, structured=shape, stop=("ked which vol", "xt"))
    first = whole(engine, sampling)
    assert first.text == "The reader as"
    inside = 0
    for split, rest in at_every_split(engine, first, sampling).items():
        given = text_of(tokenizer, first.token_ids[:split])
        inside += len(given) > len(first.text)
        assert given[: len(first.text)] + rest.text == first.text, split
        assert rest.finish_reason is SequenceEnd.STOP
        assert rest.last is not None and rest.last.stop_reason == "ked which vol"
        assert rest.token_ids == first.token_ids[split:]
    assert inside > 1, "some splits are inside the stop string"


def test_an_answer_whose_shape_was_complete_ends_at_once(engine: Engine) -> None:
    first = whole(engine, WAYS["spread"])
    ended = [token for token in first.token_ids if token > 1]
    request = GenerationRequest("late", PROMPT, WAYS["spread"], partial_token_ids=tuple(ended))
    rest = run_to_end(engine, [request])["late"]
    assert (rest.text, rest.finish_reason) == ("", SequenceEnd.STOP)


def test_a_partial_answer_of_another_format_is_refused(engine: Engine) -> None:
    request = GenerationRequest("odd", PROMPT, WAYS["spread"], partial_token_ids=(80, 81))
    rest = run_to_end(engine, [request])["odd"]
    assert rest.last is not None
    assert (rest.finish_reason, rest.last.error) == (SequenceEnd.ERROR, "invalid_grammar")


@pytest.mark.parametrize(
    "begun",
    [
        '\n\n{\t"title" :\r\n "新しい',
        '{  "title": "Vagabond"  ,\n "volumes":  ',
        '{"title": "Vagabond",\n  "volumes": 12\n}\n',
    ],
)
def test_json_that_another_engine_began_with_other_white_space_is_resumed(
    engine: Engine, tokenizer: Tokenizer, begun: str
) -> None:
    partial = tuple(tokenizer.encode(begun, add_special_tokens=False).ids)
    request = GenerationRequest("spaced", PROMPT, WAYS["schema"], partial_token_ids=partial)
    rest = run_to_end(engine, [request])["spaced"]
    assert rest.finish_reason is SequenceEnd.STOP
    answer = json.loads(begun + rest.text)
    assert answer["title"] in ("Vagabond", "新しい漫画") and isinstance(answer["volumes"], int)


@pytest.mark.parametrize("number", ["12", "1", "0"])
def test_a_number_that_another_engine_ended_is_not_continued(
    engine: Engine, tokenizer: Tokenizer, number: str
) -> None:
    begun = f'{{"title": "Vagabond", "volumes": {number}\n'
    partial = tuple(tokenizer.encode(begun, add_special_tokens=False).ids)
    request = GenerationRequest("ended", PROMPT, WAYS["schema"], partial_token_ids=partial)
    rest = run_to_end(engine, [request])["ended"]
    assert rest.finish_reason is SequenceEnd.STOP
    assert json.loads(begun + rest.text)["volumes"] == int(number)


def test_a_number_that_may_not_end_where_another_engine_ended_it_is_refused(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    schema = {"type": "integer", "minimum": 20, "maximum": 29}
    shape = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    partial = tuple(tokenizer.encode("2 ", add_special_tokens=False).ids)
    sampling = replace(WAYS["schema"], structured=shape)
    rest = run_to_end(engine, [GenerationRequest("short", PROMPT, sampling, partial_token_ids=partial)])[
        "short"
    ]
    assert rest.last is not None
    assert (rest.finish_reason, rest.last.error) == (SequenceEnd.ERROR, "invalid_grammar")


def test_a_resumed_answer_survives_a_preemption(make_engine: MakeEngine) -> None:
    small = make_engine(num_blocks=10, enable_prefix_caching=False)
    sampling = replace(SAMPLED, max_tokens=40)
    first = whole(small, sampling)
    rests = at_every_split(small, first, sampling)
    assert small.signals.preemptions > 0
    assert all(rest.token_ids == first.token_ids[split:] for split, rest in rests.items())


def test_the_demo_model_goes_on_with_its_own_greedy_answer(make_engine: MakeEngine) -> None:
    demo = make_engine(DEMO_MODEL, num_blocks=256)
    first = whole(demo, greedy(16))
    for split, rest in at_every_split(demo, first, greedy(16)).items():
        assert rest.token_ids == first.token_ids[split:]


def test_a_partial_answer_that_is_too_long_or_has_unknown_tokens_is_refused() -> None:
    info = make_info(max_model_len=64)
    fits = GenerationRequest("a", (5,) * 40, greedy(4), partial_token_ids=(6,) * 23)
    check_request(fits, info)
    with pytest.raises(PromptTooLong, match="40 tokens and 24 of its answer"):
        check_request(replace(fits, partial_token_ids=(6,) * 24), info)
    with pytest.raises(UnknownToken, match="partial answer"):
        check_request(replace(fits, partial_token_ids=(512,)), info)


def test_the_partial_tokens_go_over_the_wire() -> None:
    add = Add(GenerationRequest("a", PROMPT, greedy(4), partial_token_ids=(7, 8)))
    assert list(FrameReader(Command).feed(encode(add))) == [add]


@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3),
    split=st.integers(0, 30),
)
def test_stop_strings_cut_the_rest_where_they_cut_the_whole(text: str, stops: list[str], split: int) -> None:
    def cut(stop: StopStrings, stream: str) -> str:
        given = ""
        for character in stream:
            given += stop.push(character)
            if stop.matched is not None:
                return given
        return given + stop.flush()

    given, later = text[:split], text[split:]
    if any(stop in given for stop in stops):
        return  # such an answer has ended
    undisturbed, resumed = StopStrings(stops), StopStrings(stops)
    first = cut(undisturbed, text)
    resumed.begin(given)
    assert given[: len(first)] + cut(resumed, later) == first
    assert resumed.matched == undisturbed.matched
