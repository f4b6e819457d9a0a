"""Log-probabilities as workers send them: OpenAI's two shapes, and vLLM's token ids in place of texts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.backends.workers.errors import BadHttp
from gateway.contracts.values import TokenLogprob

# How vLLM writes a token when it is asked for ids.
TOKEN_ID = "token_id:"


class _Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(msgspec.Struct):
    """A chat's ``content``, or a text completion's parallel lists."""

    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


_decode = msgspec.json.Decoder(_Logprobs).decode


class LogprobReader:
    """Reads the entries of one answer.

    Args:
        count: alternatives asked for.
        token_bytes: what a token id stands for.
    """

    __slots__ = ("_count", "_token_bytes")

    def __init__(self, count: int | None, token_bytes: Callable[[int], bytes]) -> None:
        self._count = count or 0
        self._token_bytes = token_bytes

    def read(self, raw: bytes) -> list[TokenLogprob]:
        """An entry a token. Raises BadHttp."""
        try:
            told = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadHttp("log-probabilities are in no shape of OpenAI's contract") from None
        if told.content is not None:
            return [self._chat(entry) for entry in told.content]
        if told.tokens is None or told.token_logprobs is None:
            return []
        tops = told.top_logprobs or [None] * len(told.tokens)
        return [
            TokenLogprob(self._data(token), logprob or 0.0, self._likely(top or {}))
            for token, logprob, top in zip(told.tokens, told.token_logprobs, tops, strict=False)
        ]

    def _chat(self, entry: _Entry) -> TokenLogprob:
        alternatives = (entry.top_logprobs or [])[: self._count]
        top = tuple([TokenLogprob(self._data(a.token, a.bytes), a.logprob) for a in alternatives])
        return TokenLogprob(self._data(entry.token, entry.bytes), entry.logprob, top)

    def _likely(self, top: dict[str, float]) -> tuple[TokenLogprob, ...]:
        """The token that came is among them even when it is none of the likely ones: it sorts last then."""
        best = sorted(top.items(), key=lambda item: -item[1])[: self._count]
        return tuple([TokenLogprob(self._data(token), logprob) for token, logprob in best])

    def _data(self, token: str, data: list[int] | None = None) -> bytes:
        if token.startswith(TOKEN_ID) and token[len(TOKEN_ID) :].isdecimal():
            return self._token_bytes(int(token[len(TOKEN_ID) :]))
        try:
            return token.encode() if data is None else bytes(data)
        except ValueError:
            raise BadHttp("the bytes of a token are no bytes") from None
