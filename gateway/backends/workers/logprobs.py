"""Log-probabilities as workers send them: OpenAI's two formats, and vLLM's token ids instead of texts."""

import math
from collections.abc import Callable

import msgspec

from gateway.backends.workers.errors import BadHttp
from gateway.contracts.values import TokenLogprob

TOKEN_ID = "token_id:"  # prefix of a token in vLLM's output when ids are requested


class _Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(_Alternative):
    top_logprobs: list[_Alternative] | None = None


class WorkerLogprobs(msgspec.Struct):
    """A chat's ``content``, or a text completion's parallel lists."""

    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class LogprobReader(msgspec.Struct, frozen=True):
    """Reads the entries of one answer, each with at most ``count`` alternatives."""

    count: int
    token_bytes: Callable[[int], bytes]

    def read(self, entries: WorkerLogprobs) -> list[TokenLogprob]:
        """One entry for each token. Raises BadHttp."""
        if entries.content is not None:
            return [self._chat(entry) for entry in entries.content]
        if entries.tokens is None or entries.token_logprobs is None:
            return []
        tops = entries.top_logprobs or [None] * len(entries.tokens)
        return [
            TokenLogprob(self._data(token), math.nan if logprob is None else logprob, self._likely(top or {}))
            for token, logprob, top in zip(entries.tokens, entries.token_logprobs, tops, strict=False)
        ]

    def _chat(self, entry: _Entry) -> TokenLogprob:
        alternatives = (entry.top_logprobs or [])[: self.count]
        top = tuple([TokenLogprob(self._data(a.token, a.bytes), a.logprob) for a in alternatives])
        return TokenLogprob(self._data(entry.token, entry.bytes), entry.logprob, top)

    def _likely(self, top: dict[str, float]) -> tuple[TokenLogprob, ...]:
        """The likeliest alternatives. The sampled token may be listed in addition; it then sorts last."""
        best = sorted(top.items(), key=lambda item: -item[1])[: self.count]
        return tuple([TokenLogprob(self._data(token), logprob) for token, logprob in best])

    def _data(self, token: str, data: list[int] | None = None) -> bytes:
        if token.startswith(TOKEN_ID) and token[len(TOKEN_ID) :].isdecimal():
            return self.token_bytes(int(token[len(TOKEN_ID) :]))
        try:
            return token.encode() if data is None else bytes(data)
        except ValueError:
            raise BadHttp("the bytes of a token are not bytes") from None
