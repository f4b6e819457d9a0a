"""Analysis of a chat template's syntax tree: whether messages render on their own, and with what markup.

**Independence.** :func:`renders_each_message_alone` accepts a constant head, one loop over the messages whose
body reads only its own message (and whether it is the first), and a tail that depends only on
``add_generation_prompt``. Then ``text(m1 … mn) = first(m1) + rest(m2) + … + rest(mn) + tail``, so messages
may be rendered, tokenized and cached one by one. A template with an unknown construct is rendered as a whole.

**Frames.** Rendering through Jinja takes longer than encoding. Most of these templates only put markup around
the text, trimmed or unchanged; then the markup of plain messages (a role and a text, no calls) is learned
once for each role, and such a message is three strings joined. A template that examines the text is rendered
by Jinja each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import nodes

N = TypeVar("N", bound=nodes.Node)

_OUTSIDE = frozenset({"tools", "documents"})  # the same for a whole conversation, so constants
_TAIL = frozenset({"add_generation_prompt"})
_INSIDE = frozenset({"raise_exception"})
_IMPURE_FILTERS = frozenset({"random"})

# Statements with a local effect (``break`` would end the loop for later messages too). Expressions are judged
# by the names they use.
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.Continue)


def renders_each_message_alone(tree: nodes.Template, specials: frozenset[str]) -> bool:
    """Whether every message renders independently; ``specials`` are the names of the special tokens."""
    constants = specials | _OUTSIDE
    aliases = {"messages"}
    loop: nodes.For | None = None
    for node in tree.body:
        match node:
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Name(name=of)) if of in aliases:
                aliases.add(name)  # {% set loop_messages = messages %}
            case nodes.For() if loop is None and _is_plain_loop(node, aliases, constants):
                loop = node
            case _:
                names = constants if loop is None else constants | _TAIL
                if _within(node, nodes.For, nodes.Assign) or not _looks_only_at(node, names):
                    return False
    return loop is not None


# Constructs of a template whose cost is known to be small: none that repeats a text or a list, and no loop
# except over the messages or a value of one message.
_CHEAP_FILTERS = frozenset(
    {
        "capitalize", "default", "d", "first", "last", "length", "count", "list", "lower", "map",
        "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "string", "title", "tojson",
        "trim", "upper", "items", "e", "escape", "join",
    }
)  # fmt: skip
# Their result may be several times as long as their input.
_LENGTHENING = frozenset({"tojson", "e", "escape", "join"})
_LONGEST_SEPARATOR = 16
_JOINING = (nodes.Add, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict)
_CHEAP_CALLS = frozenset({"raise_exception", "strftime_now", "namespace"})
_CHEAP_METHODS = frozenset(
    {
        "startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "lower", "upper",
        "title", "get", "items", "keys", "values",
    }
)  # fmt: skip
_DEAR = (
    *(nodes.Mul, nodes.Pow, nodes.AssignBlock, nodes.Macro, nodes.CallBlock),
    *(nodes.Include, nodes.Import, nodes.FromImport),
)
_LOOP_NUMBERS = frozenset({"index", "index0", "revindex", "revindex0", "length", "depth", "depth0"})
_MOST_LOOPS = 8
_LARGEST_NUMBER = 1_000


def is_cheap(tree: nodes.Template) -> bool:
    """Whether the result is at most as long as the conversation times its number of messages."""
    if any(tree.find_all(_DEAR)) or len(list(tree.find_all(nodes.For))) > _MOST_LOOPS:
        return False
    targets = [one.target for one in tree.find_all(nodes.Assign)]
    made = {name.name for one in targets for name in _within(one, nodes.Name)}
    made |= {name.name for one in targets for name in _within(one, nodes.NSRef)}
    values = (const.value for const in tree.find_all(nodes.Const))
    numbers = (value for value in values if isinstance(value, int | float))
    return (
        all(map(_is_cheap_filter, tree.find_all(nodes.Filter)))
        and all(map(_is_cheap_call, tree.find_all(nodes.Call)))
        and all(map(_is_number, tree.find_all(nodes.Mod)))  # of a text it is a format
        and all(abs(number) <= _LARGEST_NUMBER for number in numbers)
        and not any(_may_double(one.node, made) for one in tree.find_all(nodes.Assign))
        and not any(_repeats_messages(loop, tree) for loop in tree.find_all(nodes.For))
    )


def _is_cheap_filter(node: nodes.Filter) -> bool:
    if node.name not in _CHEAP_FILTERS:
        return False
    if node.name == "join":
        constant = all(isinstance(one, nodes.Const) for one in node.args)
        lengths = [len(str(one.value)) for one in node.args if isinstance(one, nodes.Const)]
        if not constant or node.kwargs or node.dyn_args or node.dyn_kwargs or len(lengths) > 1:
            return False
        if max(lengths, default=0) > _LONGEST_SEPARATOR:
            return False
    inner = [] if node.node is None else _within(node.node, nodes.Filter)
    return node.name not in _LENGTHENING or not any(one.name in _LENGTHENING for one in inner)


def _is_number(node: nodes.Node) -> bool:
    match node:
        case nodes.Const(value=int()) | nodes.Filter(name="length" | "count"):
            return True
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=name):
            return name in _LOOP_NUMBERS
        case nodes.Add() | nodes.Sub() | nodes.Mod():
            return _is_number(node.left) and _is_number(node.right)
    return False


def _is_cheap_call(call: nodes.Call) -> bool:
    match call.node:
        case nodes.Name(name=name):
            return name in _CHEAP_CALLS
        case nodes.Getattr(attr=method):
            return method in _CHEAP_METHODS
    return False


def _may_double(value: nodes.Node, made: set[str]) -> bool:
    """Whether an assigned value may be twice as long as a value assigned before."""
    used = [one for one in _within(value, nodes.Name) if one.name in made]
    lengthened = any(one.name in _LENGTHENING for one in _within(value, nodes.Filter))
    return len(used) > (0 if lengthened else 1) and (lengthened or bool(_within(value, *_JOINING)))


def _repeats_messages(loop: nodes.For, tree: nodes.Template) -> bool:
    """Whether the loop is recursive, or contains a loop over more than the current item."""
    own = {one.name for one in _within(loop.target, nodes.Name)}
    assigned = [node for part in loop.body for node in _within(part, nodes.Assign)]
    # Variables that only this loop assigns, from the current item.
    for target in [node.target for node in assigned if isinstance(node.target, nodes.Name)]:
        from_item = [one.target for one in assigned if {n.name for n in _within(one.node, nodes.Name)} <= own]
        stores = [one for one in tree.find_all(nodes.Name) if one.name == target.name and one.ctx == "store"]
        if all(any(store is one for one in from_item) for store in stores):
            own.add(target.name)
    inner = [one for part in loop.body for one in _within(part, nodes.For)]
    return loop.recursive or any(
        name.name not in own for one in inner for name in _within(one.iter, nodes.Name)
    )


def time_formats(tree: nodes.Template) -> tuple[str, ...] | None:
    """The formats in which a template shows the time; ``None`` if what it shows is not known."""
    formats = [
        call.args[0].value
        for call in tree.find_all(nodes.Call)
        if _is_time(call.node) and len(call.args) == 1 and isinstance(call.args[0], nodes.Const)
    ]
    asked = sum(one.name == "defined" and _is_time(one.node) for one in tree.find_all(nodes.Test))
    impure = any(one.name in _IMPURE_FILTERS for one in tree.find_all(nodes.Filter))
    known = len(formats) == sum(map(_is_time, tree.find_all(nodes.Name))) - asked
    return tuple(map(str, formats)) if known and not impure else None


def _is_time(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "strftime_now"


def _is_plain_loop(loop: nodes.For, aliases: set[str], constants: frozenset[str]) -> bool:
    """Whether ``loop`` is over all messages in order, and its body depends on the current message only.

    A variable that the body assigns lives until the end of the iteration (Jinja's scoping).
    """
    if not (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases):
        return False
    if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
        return False
    # The loop's variable must not shadow a name that has a meaning here.
    if loop.target.name in aliases | constants | _TAIL | _INSIDE | {"loop"}:
        return False
    known = constants | _INSIDE | {loop.target.name}
    for node in loop.body:
        for made in _within(node, nodes.Assign, nodes.For):
            assert isinstance(made, nodes.Assign | nodes.For)
            if not isinstance(made.target, nodes.Name):
                return False
            known |= {made.target.name}
    if known & (aliases | _TAIL | {"loop"}):
        return False
    return all(_looks_only_at(node, known, in_loop=True) for node in loop.body)


def _looks_only_at(node: nodes.Node, names: frozenset[str], *, in_loop: bool = False) -> bool:
    """Whether ``node`` uses known statements and filters, and reads no other name than ``names``."""
    firsts: set[int] = set()
    for candidate in _within(node, nodes.Getattr, nodes.Compare) if in_loop else ():
        # {{ loop.first }} and {{ loop.index0 == 0 }} only tell whether the message is the first.
        match candidate:
            case (
                nodes.Getattr(attr="first", node=nodes.Name(name="loop") as loop)
                | nodes.Compare(
                    expr=nodes.Getattr(attr="index0", node=nodes.Name(name="loop") as loop),
                    ops=[nodes.Operand(op="eq", expr=nodes.Const(value=0))],
                )
            ):
                firsts.add(id(loop))
    for part in _within(node, nodes.Stmt, nodes.Name, nodes.Filter):
        match part:
            case nodes.Stmt() if not isinstance(part, _STATEMENTS):
                return False
            case nodes.Filter(name=name) if name in _IMPURE_FILTERS:
                return False
            case nodes.Name(name=name) if name not in names and id(part) not in firsts:
                return False
    return True


def _within(node: nodes.Node, *kinds: type[N]) -> list[N]:
    """The node and its descendants, as far as they are of these kinds."""
    own = [node] if isinstance(node, kinds) else []
    return own + list(node.find_all(kinds))


# A character that no text contains, between two blanks that no template writes.
_BLANK = "\x1f"
_CORE = "\ufdd4"
MARKER = _BLANK + _CORE + _BLANK

# The role, and fields that a plain message does not have, but a template may read.
_CONSTANT = ("role", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Frame:
    """``before`` + the text (without the blanks around it when ``trims``) + ``after``."""

    before: str
    after: str
    trims: bool

    def around(self, text: str) -> str:
        return f"{self.before}{text.strip() if self.trims else text}{self.after}"


def frame_in(rendered: str) -> Frame | None:
    """The frame of a message whose text was :data:`MARKER`; ``None`` unless it occurs exactly once."""
    if rendered.count(_CORE) != 1:
        return None
    for shown, trims in ((MARKER, False), (_CORE, True)):
        before, found, after = rendered.partition(shown)
        if found and not before.endswith(_BLANK) and not after.startswith(_BLANK):
            return Frame(before, after, trims)
    return None


def only_frames(tree: nodes.Template) -> bool:
    """Whether an accepted template's loop only writes the messages' texts, and does not examine them."""
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1 or not isinstance(loops[0].target, nodes.Name):
        return False
    return _Body(loops[0].target.name).plain(loops[0].body)


class _Body:
    """Analyses the loop's body; ``_made`` holds the variables whose values contain the message's text."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._made: set[str] = set()

    def plain(self, statements: Sequence[nodes.Node]) -> bool:
        return all(self._statement(statement) for statement in statements)

    def _statement(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Output(nodes=parts):
                return all(map(self._writes, parts))
            case nodes.Assign(target=nodes.Name(name=made), node=value):
                if self._touches(value):
                    self._made.add(made)
                return self._writes(value)
            case nodes.If():
                branches = (*node.body, *node.elif_, *node.else_)
                return not self._touches(node.test) and self.plain(branches)
        return not self._touches(node)

    def _writes(self, node: nodes.Node) -> bool:
        """Whether the value is the message's text with markup around it, or does not depend on that text."""
        if not self._touches(node) or self._is_content(node):
            return True
        match node:
            case nodes.Name(name=name):
                return name in self._made
            case nodes.Filter(name="trim", node=nodes.Node() as value):
                plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
                return plain and self._is_content(value)
            case nodes.Add(left=left, right=right):
                return self._writes(left) and self._writes(right)
            case nodes.Concat(nodes=parts):
                return all(map(self._writes, parts))
        return False

    def _touches(self, node: nodes.Node) -> bool:
        """Whether anything in ``node`` reads the text, or the message in an unknown way."""
        parts = [node, *node.find_all(nodes.Node)]
        constants = {
            id(part.node)
            for part in parts
            if isinstance(part, nodes.Getattr | nodes.Getitem) and _field(part) in _CONSTANT
        }
        return any(
            isinstance(part, nodes.Name)
            and (part.name in self._made or (part.name == self._message and id(part) not in constants))
            for part in parts
        )

    def _is_content(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Getattr(node=nodes.Name(name=name)) | nodes.Getitem(node=nodes.Name(name=name)):
                return name == self._message and _field(node) == "content"
        return False


def _field(node: nodes.Node) -> object:
    """The name or constant by which ``node`` reads a field or an item; ``None`` for any other."""
    match node:
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return name
    return None
