"""Proof, on a template's syntax tree, that every message renders on its own.

A template passes when it is a constant head, one loop over the messages whose body looks at nothing but its
own message (and whether it is the first), and a tail that depends on ``add_generation_prompt`` alone. Then

    text(m1 … mn) = first(m1) + rest(m2) + … + rest(mn) + tail

holds for every conversation, not only for those that a test happened to try, so that messages may be
rendered, tokenized and cached one by one. Anything the proof does not know fails it, and the conversation
is rendered as a whole: slower, never wrong.
"""

from __future__ import annotations

from jinja2 import nodes

_OUTSIDE = frozenset({"tools", "documents"})  # always none here, so constants
_TAIL = frozenset({"add_generation_prompt"})
_INSIDE = frozenset({"raise_exception"})
_IMPURE_FILTERS = frozenset({"random"})

# Statements whose effect stays where they stand; expressions are judged by the names they use.
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.Continue, nodes.Break)


def renders_each_message_alone(tree: nodes.Template, specials: frozenset[str]) -> bool:
    """Whether the template is of the shape above. ``specials``: names of the special tokens."""
    constants = specials | _OUTSIDE
    aliases = {"messages"}
    loop: nodes.For | None = None
    for node in tree.body:
        if _is_alias(node, aliases):
            aliases.add(_assigned(node))
        elif isinstance(node, nodes.For):
            if loop is not None or not _is_plain_loop(node, aliases, constants):
                return False
            loop = node
        elif _with_descendants(node, (nodes.For, nodes.Assign)) or not _looks_only_at(
            node, constants if loop is None else constants | _TAIL
        ):
            return False
    return loop is not None


def _is_alias(node: nodes.Node, aliases: set[str]) -> bool:
    """``{% set loop_messages = messages %}``."""
    return (
        isinstance(node, nodes.Assign)
        and isinstance(node.target, nodes.Name)
        and isinstance(node.node, nodes.Name)
        and node.node.name in aliases
    )


def _assigned(node: nodes.Node) -> str:
    assert isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name)
    return node.target.name


def _is_plain_loop(loop: nodes.For, aliases: set[str], constants: frozenset[str]) -> bool:
    """A loop over all messages in order, whose body depends on its own message only.

    What the body assigns lives until the end of the iteration (Jinja's scoping), so it is as innocent as
    what it was made from; ``break`` would end the loop for later messages, so it is not.
    """
    if not (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases):
        return False
    if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
        return False
    # A name that the loop shadows must not be read as the thing it shadows.
    if loop.target.name in aliases | constants | _TAIL | _INSIDE | {"loop"}:
        return False
    known = constants | _INSIDE | {loop.target.name}
    for node in loop.body:
        for made in _with_descendants(node, (nodes.Assign, nodes.For)):
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
    if in_loop:
        for asked in _with_descendants(node, (nodes.Getattr, nodes.Compare)):
            name = _first_iteration_test(asked)
            if name is not None:
                firsts.add(id(name))
    for part in _with_descendants(node, (nodes.Stmt, nodes.Name, nodes.Filter, nodes.Test)):
        if isinstance(part, nodes.Stmt) and not isinstance(part, _STATEMENTS):
            return False
        if isinstance(part, nodes.Break):
            return False
        if isinstance(part, nodes.Filter) and part.name in _IMPURE_FILTERS:
            return False
        if isinstance(part, nodes.Name) and part.name not in names and id(part) not in firsts:
            return False
    return True


def _first_iteration_test(node: nodes.Node) -> nodes.Name | None:
    """The ``loop`` in ``loop.first`` and in ``loop.index0 == 0``; none for anything else."""
    if isinstance(node, nodes.Getattr) and node.attr == "first":
        return _loop_name(node.node)
    if (
        isinstance(node, nodes.Compare)
        and isinstance(node.expr, nodes.Getattr)
        and node.expr.attr == "index0"
        and len(node.ops) == 1
        and node.ops[0].op == "eq"
        and isinstance(node.ops[0].expr, nodes.Const)
        and node.ops[0].expr.value == 0
    ):
        return _loop_name(node.expr.node)
    return None


def _loop_name(node: nodes.Node) -> nodes.Name | None:
    return node if isinstance(node, nodes.Name) and node.name == "loop" else None


def _with_descendants(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> list[nodes.Node]:
    own = [node] if isinstance(node, kinds) else []
    return own + list(node.find_all(kinds))
