"""A model's chat template: renders messages as text in the format that the model was trained on.

The environment is the one of ``transformers`` (block trimming, loop controls, the ``generation`` tag,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, the special tokens by name,
``documents`` none), so that a folder renders the same text as there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from budgeting.errors import TemplateRefused
from budgeting.template_analysis import (
    is_cheap,
    only_frames,
    renders_each_message_alone,
    time_formats,
)
from budgeting.template_input import ShownTool, ShownTools, shown_message, with_texts
from budgeting.tokenizer_files import read_tokenizer_files
from budgeting.values import NO_KWARGS, Message

# Errors that a template may cause when a message is not as its author expected.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


RESERVED: Final = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages",
        "raise_exception", "strftime_now", "tokenize", "tools",
    }
)  # fmt: skip
"""Variables of a template that callers cannot set, in addition to the special tokens (``…_token``)."""


CONTINUES: Final = "continue_final_message"
GENERATES: Final = "add_generation_prompt"


def split_ending(kwargs: Mapping[str, object]) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Of what is asked of a template: how the conversation ends (``CONTINUES``, ``GENERATES``), and its
    variables."""
    ending = {name: kwargs[name] for name in (CONTINUES, GENERATES) if name in kwargs}
    return ending, {name: value for name, value in kwargs.items() if name not in ending} if ending else kwargs


def left_open(rendered: str, content: str) -> str:
    """A rendered conversation that ends in its last message's text, without the markup that closes it.

    As Transformers does with ``continue_final_message``. Raises TemplateRefused: the text is not there.
    """
    start = rendered.rfind(content.strip())
    if start < 0:
        raise TemplateRefused("it does not show the last message as it is written, which cannot be continued")
    whole = content.lstrip()
    # Templates strip messages, or do not.
    shown = whole if rendered.startswith(whole, start) else content.strip()
    return rendered[: start + len(shown)]


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks answers for training; here it renders its body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Unfolded(CodeGenerator):
    """Computes no constant expression: a short template could make gigabytes of text while it is compiled."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


_OF_DICTS: Final = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the same results in half of the time: messages are dicts, and what is safe is
    decided once for each type."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if obj.__class__ is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        place = obj.__class__, attr
        safe = self._safe.get(place)
        if safe is None:
            safe = self._safe[place] = super().is_safe_attribute(obj, attr, value)
        return safe


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = _encoder(ensure_ascii, indent, None if separators is None else tuple(separators), sort_keys)
    if not isinstance(value, ShownTool | ShownTools):
        return encoder.encode(value)
    if encoder not in value.texts:
        value.texts[encoder] = encoder.encode(value)
    return value.texts[encoder]


@lru_cache
def _encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    # `json.dumps` makes one each time, in half of its time for a call's arguments.
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# Renders a job of :func:`prepare_render` within bounds; raises TemplateRefused when it exceeds one.
RenderElsewhere = Callable[[bytes], bytes]


class ChatTemplate:
    """A compiled template. Thread-safe: rendering shares nothing. Raises jinja2.TemplateSyntaxError.

    A template whose cost is not known to be small (``is_cheap``) is compiled and rendered by ``elsewhere``,
    since it may take any time and memory; without ``elsewhere``, in this process.
    """

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        *,
        now: Callable[[], datetime],
        elsewhere: RenderElsewhere | None = None,
    ) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], optimized=False
        )
        environment.code_generator_class = _Unfolded
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        tree = environment.parse(source)
        self._elsewhere = None if is_cheap(tree) else elsewhere
        # Whether the template is rendered elsewhere, within bounds, which takes milliseconds.
        self.is_bounded = self._elsewhere is not None
        self._specials = dict(specials)
        self.each_message_alone = renders_each_message_alone(tree, frozenset(specials))
        self.frames_only = self.each_message_alone and only_frames(tree)
        self.reads_tools = any(used.name == "tools" for used in tree.find_all(nodes.Name))
        self._template = None if self._elsewhere is not None else environment.from_string(tree)
        self._now = now
        self._time_formats = time_formats(tree)

    def times(self) -> tuple[str, ...] | None:
        """The times that the template can show, as it would now; ``None`` if they are not known."""
        formats = self._time_formats
        return None if formats is None else tuple([self._now().strftime(one) for one in formats])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, object] = NO_KWARGS,
        guard: Callable[[str], str] | None = None,
    ) -> str:
        """The conversation as text. Raises TemplateRefused when the template does not take it.

        Args:
            tools: the template's variable ``tools`` (``template_input.shown_tools``).
            kwargs: further variables; those in :data:`RESERVED` have no effect.
            guard: applied to every text that the caller wrote.
        """
        variables: dict[str, Any] = {
            **split_ending(kwargs)[1],
            "messages": [shown_message(message) for message in messages],
            "tools": tools,
        }
        if guard is not None:
            variables = {name: with_texts(value, guard) for name, value in variables.items()}
        variables["add_generation_prompt"] = add_generation_prompt
        if self._elsewhere is not None:
            answer = json.loads(self._elsewhere(json.dumps(variables).encode()))
            if answer["refused"] is not None:
                raise TemplateRefused(answer["refused"])
            return str(answer["text"])
        return self._rendered(variables)

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render({**variables, "documents": None, **self._specials})
        except TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from error
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefused(type(error).__name__) from error


def prepare_render(folder: str) -> Callable[[bytes], bytes]:
    """A function that renders a model folder's template: JSON of its variables to JSON of text or refusal.

    The template is compiled once, which takes a time that depends on its length alone.
    """
    files = read_tokenizer_files(folder)
    unusable = None
    try:
        template = ChatTemplate(files.template, files.specials, now=datetime.now)
    except (TemplateError, RecursionError) as error:
        unusable = str(error) or type(error).__name__

    def render(job: bytes) -> bytes:
        text, refused = None, unusable
        if refused is None:
            try:
                text = template._rendered(json.loads(job))
            except TemplateRefused as error:
                refused = error.reason
        return json.dumps({"text": text, "refused": refused}).encode()

    return render
