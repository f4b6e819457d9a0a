"""Whether a worker tokenizes conversations as this gateway does: only then it gets prompts as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import orjson

from budgeting.errors import TemplateRefused
from budgeting.learned_counter import PromptCounter
from budgeting.values import Message, Role
from gateway.backends.workers.client import WorkerClient

TOKENIZE_PATH = "/tokenize"
# A text that tokenizers encode differently: spaces, digits, code, characters of several tokens.
TOKENIZED = "The naïve  café_sold 1234567 Größe,\n\tfor (i = 0; i <= 9; i++) {漫画の巻数} Привет, مرحبا 🎉!"
# One turn, and several with a system message: templates differ in what they add to each.
SAMPLES = (
    (Message(Role.USER, TOKENIZED),),
    (
        Message(Role.SYSTEM, "Answer in one line."),
        Message(Role.USER, "  What is 7 + 5?\n"),
        Message(Role.ASSISTANT, "12"),
        Message(Role.USER, TOKENIZED),
    ),
)
# Marks of the reasoning parts of answers. A vLLM may have a parser for them, which works on chats alone.
REASONING_MARKS = ("</think>", "</seed:think>", "[/THINK]", "<|channel|>", "<channel|>", "<|END_THINKING|>")


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]
    count: int | None = None


_decode_tokens = msgspec.json.Decoder(_Tokens).decode


def read_tokens(body: bytes) -> tuple[int, ...]:
    """The ids in an answer of ``/tokenize``.

    Raises ValueError, also for no ids without a count: llama.cpp's ``/tokenize``, which takes other fields.
    """
    answer = _decode_tokens(body)
    if not answer.tokens and answer.count is None:
        raise ValueError("no tokens and no count")
    return answer.tokens


@dataclass(frozen=True, slots=True)
class TokenizerCheck:
    """What a worker's ``/tokenize`` must answer.

    Args:
        samples: conversations, each with the gateway's own ids; without samples no worker passes.
        reasons: whether the vocabulary has marks of reasoning parts.
    """

    samples: Sequence[tuple[Sequence[Message], tuple[int, ...]]] = ()
    reasons: bool = False

    @classmethod
    def of(cls, tokenizer: PromptCounter) -> "TokenizerCheck":
        """The check for a tokenizer. Conversations that its template refuses are left out."""
        samples = []
        for messages in SAMPLES:
            try:
                samples.append((tokenizer.as_sent(messages, 1), tokenizer.encode_chat(messages)))
            except TemplateRefused:
                continue
        marks = (tokenizer.encode(mark, add_special_tokens=False) for mark in REASONING_MARKS)
        return cls(tuple(samples), any(len(ids) == 1 for ids in marks))

    async def passes(self, worker: WorkerClient, model: str, timeout_s: float) -> bool:
        """Whether the worker gives the gateway's ids for every sample. Raises TransportError."""
        for messages, ids in self.samples:
            shown = [{"role": one.role, "content": one.content} for one in messages]
            body = orjson.dumps({"model": model, "messages": shown, "add_generation_prompt": True})
            answer = await worker.get(worker.root + TOKENIZE_PATH, timeout_s=timeout_s, body=body)
            if answer.read(read_tokens) != ids:
                return False
        return bool(self.samples)
