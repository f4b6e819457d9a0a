"""What a request can ask of a backend beyond plain generation."""

from collections.abc import Collection
from enum import StrEnum
from typing import Final


class Feature(StrEnum):
    """A capability that a request may need; its value is or begins with the request's field."""

    TEMPERATURE = "temperature"
    TEMPERATURE_ABOVE_1 = "temperature above 1"
    TOP_P = "top_p"
    TOP_K = "top_k"
    MIN_P = "min_p"
    SEED = "seed"
    STOP = "stop"
    N = "n"
    PRESENCE_PENALTY = "presence_penalty"
    FREQUENCY_PENALTY = "frequency_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    LOGIT_BIAS = "logit_bias"
    LOGPROBS = "logprobs"
    ECHO = "echo"
    IGNORE_EOS = "ignore_eos"
    MIN_TOKENS = "min_tokens"
    STOP_TOKEN_IDS = "stop_token_ids"
    RESPONSE_FORMAT = "response_format"
    RAW_PROMPT = "prompt"
    TOOLS = "tools"
    CUSTOM_TOOLS = "tools of type custom"
    TOOL_GRAMMARS = "tools of type custom with a grammar"
    ALLOWED_TOOLS = "tool_choice of type allowed_tools"
    REASONING_EFFORT = "reasoning_effort"
    TEMPLATE_KWARGS = "chat_template_kwargs"
    CONTINUE_FINAL_MESSAGE = "continue_final_message"
    ADD_GENERATION_PROMPT = "add_generation_prompt"
    IMAGES = "messages with images"
    LORA = "adapter_id"
    UNKNOWN_FIELDS = "unknown_fields"
    """The backend takes requests with fields that Sluice does not know; they may be dropped."""
    FIELDS_PASSED = "unknown_fields passed on"

    @property
    def field(self) -> str:
        """The request's field that asks for it."""
        return self.value.split()[0]


VLLM_FEATURES: Final = frozenset(
    {
        Feature.IGNORE_EOS,
        Feature.MIN_TOKENS,
        Feature.STOP_TOKEN_IDS,
        Feature.CONTINUE_FINAL_MESSAGE,
        Feature.ADD_GENERATION_PROMPT,
    }
)
"""Features of vLLM's own fields that Sluice knows; workers that accept unknown fields get these too."""
TOOL_FEATURES: Final = frozenset(
    {Feature.TOOLS, Feature.CUSTOM_TOOLS, Feature.TOOL_GRAMMARS, Feature.ALLOWED_TOOLS}
)
KNOWN_FEATURES: Final = (
    frozenset(Feature)
    - {Feature.ECHO, Feature.IMAGES, Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED}
    - TOOL_FEATURES
)
"""What Sluice's own fields can ask for, without tools, images, echo and unknown fields."""


class Capability(StrEnum):
    """What a model can do, whatever server runs it."""

    TOOLS = "tools"
    REASONING = "reasoning"
    STRUCTURED_OUTPUT = "structured_output"


_FEATURES_OF: Final = {
    Capability.TOOLS: TOOL_FEATURES,
    Capability.REASONING: frozenset({Feature.REASONING_EFFORT}),
    Capability.STRUCTURED_OUTPUT: frozenset({Feature.RESPONSE_FORMAT}),
}


def features_without(capabilities: Collection[Capability]) -> frozenset[Feature]:
    """The features that a model with only these capabilities lacks on any backend."""
    missing = [features for one, features in _FEATURES_OF.items() if one not in capabilities]
    return frozenset[Feature]().union(*missing)
