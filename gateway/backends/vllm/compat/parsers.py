"""Chooses vLLM's parsers for a model, and prepares the parsing of an answer."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from budgeting.token_ids import joined
from engine import errors
from gateway.backends.hermes import arguments_schema
from gateway.backends.port import Work
from gateway.backends.tool_bodies import form_warnings, message_body, tool_fields, with_allowed_tools
from gateway.backends.vllm.answer_parser import AnswerParser
from gateway.backends.vllm.parser_names import ParserNames
from gateway.contracts.values import template_variables
from resilience.failures import CannotResume, invalid_input

# Parsers that read something else from a stream than from the whole answer, however the stream is cut.
MISREADING_TOOLS = frozenset({"functiongemma", "jamba", "phi4_mini_json"})
MISREADING_REASONING = frozenset({"ernie45", "granite"})
# Parsers for gpt-oss alone: vLLM replaces them as a whole there, and they read nothing from other models.
HARMONY = frozenset({"openai", "openai_gptoss"})
MAX_MESSAGE = 300


def _check_names(names: ParserNames) -> None:
    """Raise InvalidConfig for a parser that vLLM does not have, or that misreads streams."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, name, known, misreading in (
        ("tool_parser", names.tool, ToolParserManager.list_registered(), MISREADING_TOOLS),
        ("reasoning_parser", names.reasoning, ReasoningParserManager.list_registered(), MISREADING_REASONING),
    ):
        if name is None or (name in known and name not in misreading):
            continue
        what = "misreads streams" if name in misreading else "is none of vLLM's"
        allowed = ", ".join(sorted(set(known) - misreading))
        raise errors.InvalidConfig(f"engine.{key}: {name!r} {what}; allowed: none, {allowed}")


def parser_class(names: ParserNames, tokenizer: Any, kind: str) -> Any:
    """The class of the named parsers, if any, for a model of type ``kind``. Raises InvalidConfig."""
    from vllm.parser import ParserManager

    # This logger says at each start that tools are on, even if vLLM's logs do not go through the gateway.
    logging.getLogger("vllm.parser.parser_manager").setLevel(logging.WARNING)
    _check_names(names)
    harmony = kind == "gpt_oss"
    if not harmony and (found := HARMONY.intersection((names.tool, names.reasoning))):
        raise errors.InvalidConfig(f"vLLM's parser {min(found)} reads gpt_oss models alone, not {kind!r}")
    try:
        return ParserManager.get_parser(
            tool_parser_name=names.tool,
            reasoning_parser_name=names.reasoning,
            enable_auto_tools=True,
            is_harmony=harmony,
            tokenizer=tokenizer,
        )
    except (TypeError, ImportError) as error:
        raise errors.InvalidConfig(
            f"engine.tool_parser {names.tool}, engine.reasoning_parser {names.reasoning}: {error}"
        ) from error


def needs_tags(parser: Any) -> bool:
    """Whether a tool parser needs structural tags for a required call; switches them on then.

    Other parsers read a required call from JSON; a parser that streams its own format cannot.
    """
    if parser is None or parser.structural_tag_model is None:
        return False
    if parser.supports_required_and_named and not parser.engine_based_streaming:
        return False
    parser.supports_required_and_named = False
    os.environ["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "1"
    return True


class Parsers:
    """vLLM's parsers of one model's answers; ``singly``: they must get one token at a time.

    Raises InvalidConfig: the model's tokenizer lacks what a parser needs.
    """

    def __init__(
        self, tokenizer: Any, model_config: Any, token_bytes: Callable[[int], bytes], names: ParserNames
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

        self._envelope = ToolStrictLevel.FUNCTION
        self.names = names
        self._request = ChatCompletionRequest
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._token_bytes = token_bytes
        kind = getattr(model_config.hf_config, "model_type", "")
        self._class = parser_class(names, tokenizer, kind)
        both = (self._class.tool_parser_cls, self._class.reasoning_parser_cls) if self._class else ()
        found = [part for part in both if part is not None]
        # Two parsers lose a call inside reasoning if the reasoning ends in the same piece.
        self.singly = len(found) != 1 or not found[0].engine_based_streaming

    def parsed(self, work: Work, grammar: Any) -> AnswerParser | None:
        """The parser of an answer; ``None`` if it cannot have reasoning or tool calls."""
        if self._class is None or not work.messages or not (self.names.reasoning or work.tools):
            return None
        allowed = () if work.tool_choice is None else work.tool_choice.allowed
        work = with_allowed_tools(work)
        messages = [message_body(one.without_parts, reasoning="reasoning") for one in work.messages]
        kwargs = {"chat_template_kwargs": template_variables(work.reasoning_effort, work.template_kwargs)}
        try:
            request = self._request.model_validate_json(
                orjson.dumps({"messages": messages, **tool_fields(work)})
            )
            if work.tool_choice is not None and work.tool_choice.forces_call:
                # vLLM takes any JSON as the arguments of a forced call of a tool that is not strict.
                for given, tool in zip(request.tools, work.tools, strict=True):
                    given.function.strict, given.function.parameters = True, arguments_schema(tool)
            request.structured_outputs = grammar
            parsers = [self._new(request, kwargs) for _ in range(work.sampling.n)]
            if self.names.reasoning or request.tool_choice != "none":
                adjusting = self._new(request, kwargs)
                if grammar is not None:
                    # Else the form of the answer replaces structural tags, so that no tool can be called.
                    adjusting.tool_strict_level = self._envelope
                request = adjusting.adjust_request(request)
                _close_calls(request.structured_outputs)
        except (ValueError, TypeError) as error:
            text = " ".join(str(error).split())[:MAX_MESSAGE]
            raise invalid_input(text, "tools") from error
        if work.partial_ids and request.structured_outputs is not None:
            raise CannotResume("vLLM cannot resume a constrained answer")
        prompt = list(joined(work.token_ids))
        ended = request.resolve_reasoning_ended(parsers[0], prompt)
        return AnswerParser(
            parsers=parsers,
            request=request,
            prompt_ids=prompt,
            generation_id=work.generation_id,
            token_bytes=self._token_bytes,
            singly=self.singly,
            late=bool(work.sampling.stop),
            allowed=allowed,
            form_warnings=form_warnings(work) if request.structured_outputs is grammar else (),
            options={
                "reasoning_ended": ended,
                "reasoning_parser_kwargs": kwargs if self.names.reasoning else None,
            },
        )

    def _new(self, request: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._class(self._tokenizer, request.tools, model_config=self._model_config, **kwargs)


def _close_calls(grammar: Any) -> None:
    """Forbid further fields in vLLM's schema of required calls: a model could add fields without end."""
    if grammar is not None and isinstance(grammar.json, dict):
        for call in grammar.json.get("items", {}).get("anyOf", ()):
            call["additionalProperties"] = False
