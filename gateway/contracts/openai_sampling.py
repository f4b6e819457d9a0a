"""Converts OpenAI's sampling fields, and vLLM's fields for the answer's shape, to internal values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gateway.contracts.fields import MAX_TOKEN_ID, SEED_MAX, stops
from gateway.contracts.formats import StructuredBody, choice_shape, from_format, schema_shape, text_shape
from gateway.contracts.openai_body import OpenAIBody
from gateway.contracts.refusals import given, not_allowed, path_of
from gateway.contracts.values import EMPTY, PLAIN_TEXT, FormatType, ResponseFormat, Sampling

MAX_LOGIT_BIAS: Final = 1_024  # most entries of ``logit_bias``; each is applied to every step's logits

MAX_LOGPROBS: Final = 256
"""Most log-probabilities per step, of all texts together: 128 texts of 20 each would be 200 KB per step."""

_GUIDED: Final = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar"})


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

    Raises InvalidRequest: two fields ask for different shapes, or a shape is not valid.
    """
    is_guided = not _GUIDED.isdisjoint(body.__pydantic_fields_set__)
    if body.response_format is None and body.structured_outputs is None and not is_guided:
        return "response_format", PLAIN_TEXT
    shapes: dict[str, ResponseFormat | None] = {"response_format": from_format(body.response_format)}
    if is_guided:  # vLLM's older names of the same fields
        older = StructuredBody.model_construct(
            json_schema=body.guided_json,
            regex=body.guided_regex,
            choice=body.guided_choice,
            grammar=body.guided_grammar,
        )
        shapes |= _shapes("guided_", older)
    if body.structured_outputs is not None:
        shapes |= _shapes("structured_outputs.", body.structured_outputs)
    found = {field: shape for field, shape in shapes.items() if shape and shape.type is not FormatType.TEXT}
    if len(set(found.values())) > 1:  # clients of several versions of vLLM send one shape by both names
        first, second = list(found)[:2]
        raise not_allowed(second, f"is given together with {first}", "one field that constrains the answer")
    return next(iter(found.items()), ("response_format", PLAIN_TEXT))


def _shapes(prefix: str, asked: StructuredBody) -> dict[str, ResponseFormat | None]:
    return {
        (at := f"{prefix}json"): schema_shape(asked.json_schema, at),
        (at := f"{prefix}regex"): text_shape(FormatType.REGEX, asked.regex, at),
        (at := f"{prefix}choice"): choice_shape(asked.choice, at),
        (at := f"{prefix}grammar"): text_shape(FormatType.GRAMMAR, asked.grammar, at),
        f"{prefix}json_object": ResponseFormat(FormatType.JSON_OBJECT) if asked.json_object else None,
    }


def _logit_bias(entries: Mapping[str, Any]) -> Mapping[int, float]:
    if len(entries) > MAX_LOGIT_BIAS:
        raise not_allowed("logit_bias", f"has {len(entries)} entries", f"{MAX_LOGIT_BIAS} or fewer")
    biases: dict[int, float] = {}
    for key, value in entries.items():
        # At most ten digits: longer ones are out of range anyway and slow to convert.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise not_allowed(path_of(("logit_bias", key)), "is not a token id", f"0 to {MAX_TOKEN_ID}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise not_allowed(path_of(("logit_bias", key)), f"is {given(value)}", "-100 to 100")
        biases[int(key)] = float(value)
    return MappingProxyType(biases)
