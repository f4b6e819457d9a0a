"""What a request can ask of a backend beyond plain generation."""

from collections.abc import Collection
from enum import StrEnum
from typing import Final


class Feature(StrEnum):
    """Named like the request's fields."""

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
        """The request's field."""
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
"""What Sluice knows of vLLM's fields; workers that take unknown fields get them too."""
TOOL_FEATURES: Final = frozenset({Feature.TOOLS, Feature.CUSTOM_TOOLS, Feature.ALLOWED_TOOLS})
KNOWN_FEATURES: Final = (
    frozenset(Feature)
    - {Feature.ECHO, Feature.IMAGES, Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED}
    - TOOL_FEATURES
)
"""What Sluice's own fields can ask for, but for tools, images and for what only a vLLM server has."""


class Capability(StrEnum):
    """What models differ in, whatever the server that runs them."""

    TOOLS = "tools"
    REASONING = "reasoning"
    STRUCTURED_OUTPUT = "structured_output"


_FEATURES_OF: Final = {
    Capability.TOOLS: TOOL_FEATURES,
    Capability.REASONING: frozenset({Feature.REASONING_EFFORT}),
    Capability.STRUCTURED_OUTPUT: frozenset({Feature.RESPONSE_FORMAT}),
}


def features_without(capabilities: Collection[Capability]) -> frozenset[Feature]:
    """What a model with these capabilities alone cannot do, on any backend."""
    missing = [features for one, features in _FEATURES_OF.items() if one not in capabilities]
    return frozenset[Feature]().union(*missing)
