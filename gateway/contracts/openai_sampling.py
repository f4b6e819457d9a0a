"""Converts OpenAI's sampling fields, and vLLM's fields for the answer's shape, to internal values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gateway.contracts.fields import MAX_TOKEN_ID, SEED_MAX, stops
from gateway.contracts.formats import StructuredBody, choice_shape, from_format, schema_shape, text_shape
from gateway.contracts.openai_body import OpenAIBody
from gateway.contracts.refusals import given, not_allowed, path_of
from gateway.contracts.values import EMPTY, PLAIN_TEXT, FormatType, ResponseFormat, Sampling

MAX_LOGIT_BIAS: Final = 1_024
"""Most entries of ``logit_bias``; each is applied to every step's logits."""

MAX_LOGPROBS: Final = 256
"""Most log-probabilities per step, of all texts together: 128 texts of 20 each would be 200 KB per step."""

_SHAPERS: Final = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar"} | StructuredBody.model_fields.keys()
)


def sampling_of(body: OpenAIBody, *, max_tokens: int | None, logprobs: int | None, **echo: bool) -> Sampling:
    """The sampling parameters; absent ones are neutral. ``echo``: the fields ``echo`` and ``prompt_only``.

    Raises InvalidRequest: ``logit_bias``, ``min_tokens``, ``seed``, or too many log-probabilities together.
    """
    n = body.n or 1
    if logprobs is not None and n * (logprobs + 1) > MAX_LOGPROBS:
        raise not_allowed(
            "n", f"is {n} with {logprobs} top_logprobs", f"n * (top_logprobs + 1) of {MAX_LOGPROBS} or less"
        )
    if body.seed is not None and body.seed > SEED_MAX - n + 1:
        # Each text has the seed of the one before plus one; vLLM's engine ends when one exceeds 64 bits.
        raise not_allowed("seed", f"is {body.seed} with n {n}", f"at most {SEED_MAX - n + 1}")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise not_allowed("min_tokens", f"is {body.min_tokens}", f"at most max_tokens, {max_tokens}")
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=stops(body.stop),
        n=n,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else EMPTY,
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        **echo,
    )


def shape_of(body: OpenAIBody) -> tuple[str, ResponseFormat]:
    """The field that asks for a shape of the answer, and that shape; plain text if no field does.

    Raises InvalidRequest: two fields ask for a shape, or a shape is not valid.
    """
    if (
        body.response_format is None
        and body.structured_outputs is None
        and _SHAPERS.isdisjoint(body.__pydantic_fields_set__)
    ):
        return "response_format", PLAIN_TEXT
    shapes: dict[str, ResponseFormat | None] = {"response_format": from_format(body.response_format)}
    for prefix, asked in (("guided_", body), ("structured_outputs.", body.structured_outputs)):
        if asked is not None and not _SHAPERS.isdisjoint(asked.__pydantic_fields_set__):
            shapes |= _shapes(prefix, asked)
    found = {field: shape for field, shape in shapes.items() if shape and shape.type is not FormatType.TEXT}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise not_allowed(second, f"is given together with {first}", "one field that constrains the answer")
    return next(iter(found.items()), ("response_format", PLAIN_TEXT))


def _shapes(prefix: str, asked: OpenAIBody | StructuredBody) -> dict[str, ResponseFormat | None]:
    """The shapes of vLLM's fields, older (``guided_json``) or newer (``structured_outputs.json``)."""
    if isinstance(asked, OpenAIBody):
        schema, regex = asked.guided_json, asked.guided_regex
        choice, grammar, json_object = asked.guided_choice, asked.guided_grammar, None
    else:
        schema, regex = asked.json_schema, asked.regex
        choice, grammar, json_object = asked.choice, asked.grammar, asked.json_object
    names = [f"{prefix}{kind}" for kind in ("json", "regex", "choice", "grammar", "json_object")]
    return {
        names[0]: schema_shape(schema, names[0]),
        names[1]: text_shape(FormatType.REGEX, regex, names[1]),
        names[2]: choice_shape(choice, names[2]),
        names[3]: text_shape(FormatType.GRAMMAR, grammar, names[3]),
        names[4]: ResponseFormat(FormatType.JSON_OBJECT) if json_object else None,
    }


def _logit_bias(entries: Mapping[str, Any]) -> Mapping[int, float]:
    if len(entries) > MAX_LOGIT_BIAS:
        raise not_allowed("logit_bias", f"has {len(entries)} entries", f"{MAX_LOGIT_BIAS} or fewer")
    return MappingProxyType({_token_id(key): _bias(key, value) for key, value in entries.items()})


def _token_id(key: str) -> int:
    # At most ten digits: longer ones are out of range anyway and slow to convert.
    if key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID:
        return int(key)
    raise not_allowed(path_of(("logit_bias", key)), "is not a token id", f"0 to {MAX_TOKEN_ID}")


def _bias(key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100:
        return float(value)
    raise not_allowed(path_of(("logit_bias", key)), f"is {given(value)}", "-100 to 100")
