"""OpenAI's sampling fields and vLLM's shaping fields, mapped to the inside."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gateway.contracts.fields import MAX_TOKEN_ID, stops
from gateway.contracts.formats import Shapes, choice_shape, from_format, schema_shape, text_shape
from gateway.contracts.openai_body import OpenAIBody
from gateway.contracts.refusals import given, path_of
from gateway.contracts.values import FormatType, ResponseFormat, Sampling
from gateway.errors import InvalidRequest

MAX_LOGIT_BIAS: Final = 1_024
"""Most entries of ``logit_bias``; each is applied to every step's logits."""


def sampling_of(body: OpenAIBody, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """The sampling fields; those not given keep their neutral value.

    Raises:
        InvalidRequest: an entry of ``logit_bias`` is not a token id with a bias from -100 to 100.
    """
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=stops(body.stop),
        n=body.n or 1,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
    )


def shape_of(body: OpenAIBody) -> tuple[str, ResponseFormat]:
    """The one shape that the answer must have, and the field that asks for it.

    Raises:
        InvalidRequest: two fields ask for a shape, or one asks for an impossible one.
    """
    shapes = Shapes()
    shapes.add("response_format", from_format(body.response_format))
    shapes.add("guided_json", schema_shape(body.guided_json, "guided_json"))
    shapes.add("guided_regex", text_shape(FormatType.REGEX, body.guided_regex, "guided_regex"))
    shapes.add("guided_choice", choice_shape(body.guided_choice, "guided_choice"))
    shapes.add("guided_grammar", text_shape(FormatType.GRAMMAR, body.guided_grammar, "guided_grammar"))
    asked = body.structured_outputs
    if asked is not None:
        field = "structured_outputs"
        shapes.add(f"{field}.json", schema_shape(asked.json_schema, f"{field}.json"))
        shapes.add(f"{field}.regex", text_shape(FormatType.REGEX, asked.regex, f"{field}.regex"))
        shapes.add(f"{field}.choice", choice_shape(asked.choice, f"{field}.choice"))
        shapes.add(f"{field}.grammar", text_shape(FormatType.GRAMMAR, asked.grammar, f"{field}.grammar"))
        if asked.json_object:
            shapes.add(f"{field}.json_object", ResponseFormat(FormatType.JSON_OBJECT))
    return shapes.only()


def _logit_bias(entries: Mapping[str, Any]) -> Mapping[int, float]:
    if len(entries) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(entries)} entries; allowed: {MAX_LOGIT_BIAS} or fewer", param="logit_bias"
        )
    return MappingProxyType({_token_id(key): _bias(key, value) for key, value in entries.items()})


def _token_id(key: str) -> int:
    # At most ten digits: longer ones are out of range anyway and slow to convert.
    if key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID:
        return int(key)
    path = path_of(("logit_bias", key))
    raise InvalidRequest(f"{path} is not a token id; allowed: 0 to {MAX_TOKEN_ID}", param=path)


def _bias(key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100:
        return float(value)
    path = path_of(("logit_bias", key))
    raise InvalidRequest(f"{path} is {given(value)}; allowed: -100 to 100", param=path)
