"""A model's chat template: messages in, the text that the model was trained on out.

The environment is the one of ``transformers`` (block trimming, loop controls, the ``generation`` tag,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, the special tokens by name, ``tools``
and ``documents`` none), so that a folder renders the same text here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from budgeting.errors import TemplateRefused
from budgeting.template_analysis import only_frames, renders_each_message_alone
from budgeting.values import Message

# What a template may trip over when a message is not what its author had in mind.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks answers for training; here it renders its body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template. Thread-safe: rendering shares nothing. Raises jinja2.TemplateSyntaxError."""

    def __init__(self, source: str, specials: Mapping[str, str], *, now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self._template = environment.from_string(source)
        self._specials = dict(specials)
        tree = environment.parse(source)
        self.each_message_alone = renders_each_message_alone(tree, frozenset(specials))
        self.frames_only = self.each_message_alone and only_frames(tree)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises TemplateRefused when the template does not take it."""
        try:
            return self._template.render(
                messages=[{"role": message.role.value, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from error
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefused(type(error).__name__) from error
