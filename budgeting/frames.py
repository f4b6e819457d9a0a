"""What a chat template writes around a message's text, where it does nothing else with the text.

Rendering a message through Jinja costs more than encoding it. Most templates that render each message on its
own (:mod:`budgeting.independence`) only put markup around the text, trimmed or as it is; then the markup is
learned once for each role, and a message is three strings joined. A template that asks anything of the text
(is it empty, does it hold a tag) is rendered by Jinja each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import nodes

# A character that no text holds, between two blanks that no template writes.
_BLANK = "\x1f"
_CORE = "\ufdd4"
MARKER = _BLANK + _CORE + _BLANK

_CONTENT = "content"
_FIELDS = (_CONTENT, "role")


@dataclass(frozen=True, slots=True)
class Frame:
    """``before`` + the text (without the blanks around it when ``trims``) + ``after``."""

    before: str
    after: str
    trims: bool

    def around(self, text: str) -> str:
        """The message as rendered."""
        return f"{self.before}{text.strip() if self.trims else text}{self.after}"


def frame_in(rendered: str) -> Frame | None:
    """The frame of a message whose text was :data:`MARKER`; none when the text stands there not once."""
    if rendered.count(_CORE) != 1:
        return None
    for shown, trims in ((MARKER, False), (_CORE, True)):
        before, found, after = rendered.partition(shown)
        if found and not before.endswith(_BLANK) and not after.startswith(_BLANK):
            return Frame(before, after, trims)
    return None


def only_frames(tree: nodes.Template) -> bool:
    """Whether the loop over messages writes their texts and does nothing else with them.

    For templates that passed :func:`budgeting.independence.renders_each_message_alone`.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1 or not isinstance(loops[0].target, nodes.Name):
        return False
    return _Body(loops[0].target.name).plain(loops[0].body)


class _Body:
    """The loop's body. ``made`` holds the names whose values were made of the message's text."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._made: set[str] = set()

    def plain(self, statements: Sequence[nodes.Node]) -> bool:
        return all(self._statement(statement) for statement in statements)

    def _statement(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Output):
            return all(self._writes(part) for part in node.nodes)
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            if self._touches(node.node):
                self._made.add(node.target.name)
            return self._writes(node.node)
        if isinstance(node, nodes.If):
            branches = (*node.body, *node.elif_, *node.else_)
            return not self._touches(node.test) and self.plain(branches)
        return not self._touches(node)

    def _writes(self, node: nodes.Node) -> bool:
        """Whether the value is text around the message's text, or has nothing to do with it."""
        if not self._touches(node) or self._is_text(node):
            return True
        if isinstance(node, nodes.Filter):
            plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
            return node.name == "trim" and plain and node.node is not None and self._is_content(node.node)
        if isinstance(node, nodes.Add):
            return self._writes(node.left) and self._writes(node.right)
        if isinstance(node, nodes.Concat):
            return all(self._writes(part) for part in node.nodes)
        return False

    def _touches(self, node: nodes.Node) -> bool:
        """Whether anything in ``node`` reads the text, or the message in a way not known."""
        parts = [node, *node.find_all(nodes.Node)]
        roles = {
            id(part.node)
            for part in parts
            if isinstance(part, nodes.Getattr | nodes.Getitem) and _field(part) == "role"
        }
        return any(
            isinstance(part, nodes.Name)
            and (part.name in self._made or (part.name == self._message and id(part) not in roles))
            for part in parts
        )

    def _is_text(self, node: nodes.Node) -> bool:
        return self._is_content(node) or (isinstance(node, nodes.Name) and node.name in self._made)

    def _is_content(self, node: nodes.Node) -> bool:
        return (
            isinstance(node, nodes.Getattr | nodes.Getitem)
            and _field(node) == _CONTENT
            and isinstance(node.node, nodes.Name)
            and node.node.name == self._message
        )


def _field(node: nodes.Getattr | nodes.Getitem) -> str | None:
    """The field of a message that is read by name."""
    if isinstance(node, nodes.Getattr):
        return node.attr if node.attr in _FIELDS else None
    value = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return value if value in _FIELDS else None
