"""Errors of the budget stage.

::

    BudgetError
    ├── ContextTooLong      the parts that may not be trimmed do not fit
    ├── EmptyPrompt         a raw prompt has no token
    ├── InvalidReserve      the answer's reserve leaves no room for any prompt
    ├── NoTokenizer         a raw text for a model whose tokenizer is not available now
    ├── TemplateRefused     the model's chat template does not take such a conversation
    ├── TokenizerError      the model folder's tokenizer cannot be used (at start, never for a request)
    └── UnknownTokenId      a raw prompt holds an id outside the vocabulary
"""

from budgeting.values import PromptSection


class BudgetError(Exception):
    """A prompt cannot be planned."""


class ContextTooLong(BudgetError):
    """The parts that may not be trimmed (system part, latest turn, raw prompt) alone exceed the limit.

    ``section`` is the largest section; ``allowed`` is the model's length less the ``reserve`` for the answer,
    or the configured limit.
    """

    def __init__(self, *, section: PromptSection, needed: int, allowed: int, reserve: int) -> None:
        self.section = section
        self.needed = needed
        self.allowed = allowed
        super().__init__(
            # Claude Code reads both numbers to know how much of the conversation it must drop.
            f"the prompt has {needed} tokens > {allowed} that fit beside {reserve} for the answer, "
            f"and none of them may be trimmed (largest section: {section.value})"
        )


class InvalidReserve(BudgetError):
    """``max_tokens`` is not smaller than the model's whole length."""

    def __init__(self, *, max_tokens: int, max_model_len: int) -> None:
        super().__init__(f"max_tokens is {max_tokens}; allowed: 1 to {max_model_len - 1}")


class EmptyPrompt(BudgetError):
    """A raw prompt of no tokens: a model has nothing to continue."""

    def __init__(self) -> None:
        super().__init__("the prompt holds no tokens; allowed: at least 1")


class NoTokenizer(BudgetError):
    """A raw text must be sent as ids, and the gateway cannot make the ids of this model.

    ``later``: the model's workers could tokenize it, but do not answer now.
    """

    def __init__(self, model: str, *, later: bool) -> None:
        self.later = later
        if later:
            super().__init__(f"the workers of {model} do not tokenize now; try again")
        else:
            super().__init__(
                f"the tokenizer of {model} is not readable here and its workers cannot be asked for tokens; "
                f"name its folder as models.{model}.tokenizer, or send a chat, which needs none"
            )


class TemplateRefused(BudgetError):
    """The chat template raised: the model was not made for this order of roles, or for such a message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason[:200]
        super().__init__(f"the model's chat template refuses these messages: {self.reason}")


class TokenizerError(BudgetError):
    """A model folder's tokenizer or chat template is missing, malformed or unsafe; raised while loading."""

    def __init__(self, folder: str, problem: str) -> None:
        super().__init__(f"tokenizer of {folder}: {problem}")


class UnknownTokenId(BudgetError):
    """A raw prompt given as token ids holds one that the vocabulary does not have."""

    def __init__(self, token_id: int, vocabulary: int) -> None:
        super().__init__(f"token id {token_id} is not in the vocabulary; allowed: ids below {vocabulary}")
