"""Shared parts of commands that call a running gateway: address, common options, output as JSON or table."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any

import typer

from ops.cli.console import print_json
from ops.cli.startup import one_line_errors, print_errors
from ops.client import DEFAULT_URL, TIMEOUT_S, AdminClient, AdminError, no_gateways_answer

Url = Annotated[
    str, typer.Option("--url", envvar="SLUICE_URL", show_envvar=True, help="The gateway's address.")
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="SLUICE_ADMIN_KEY",
        show_envvar=True,
        help="An operator's or admin's key, if keys are on.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Comment = Annotated[
    str,
    typer.Option("--comment", "--message", "-m", help="The reason; stored in the history and the audit log."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Validate and show what would change; change nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Route = Annotated[str, typer.Argument(metavar="ROUTE", help="A route's name.")]
Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="A backend's name.")]


@dataclass(frozen=True, slots=True)
class Operator:
    """One command's connection to a gateway, and the form of its output; calls raise AdminError."""

    url: Url = DEFAULT_URL
    key: Key = None
    as_json: AsJson = False

    def client(self, timeout_s: float = TIMEOUT_S) -> AdminClient:
        return AdminClient(self.url, self.key, timeout_s)

    def get(self, *path: str, query: Mapping[str, str | int] | None = None) -> Any:
        return self.client().get(*path, query=query)

    def post(self, *path: str, timeout_s: float = TIMEOUT_S, **body: Any) -> Any:
        return self.client(timeout_s).post(*path, body=body)

    def show(self, answer: Any, print_table: Callable[[Any], None], *, has: Collection[str] = ()) -> None:
        """Print an answer. ``has``: keys of which a gateway's answer has one, with ``--json`` too.

        A change needs ``has``: another server's answer must not look like a change that was made.
        """
        if has and answer.keys().isdisjoint(has):
            raise AdminError(no_gateways_answer(self.url, *has))
        if self.as_json:
            print_json(answer)
        else:
            print_table(answer)


@dataclass(frozen=True, slots=True)
class Change:
    """The options of a command that changes something."""

    comment: Comment = ""
    dry_run: DryRun = False
    yes: Yes = False

    @property
    def body(self) -> dict[str, Any]:
        return {"comment": self.comment, "dry_run": self.dry_run}

    def confirm(self, question: str, *, required: bool = False) -> None:
        """Ask at a terminal. Without one, ``required`` exits unless ``--yes`` or ``--dry-run`` is given."""
        asked = not (self.yes or self.dry_run)
        if asked and required and not sys.stdin.isatty():
            print_errors(f"{question} give --yes")
            raise typer.Exit(2)
        confirm(question, not asked)


def command_group(name: str, help: str) -> typer.Typer:
    """A group of subcommands, for :func:`operator_command`; a single subcommand keeps its name."""
    group = typer.Typer(name=name, help=help, no_args_is_help=True)
    group.callback()(lambda: None)
    return group


def operator_command(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of ``group``; see :func:`with_options`."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        group.command(name)(with_options()(run))
        return run

    return register


def with_options(
    *errors: type[Exception], code: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a typer command of a function: a parameter of a dataclass becomes the options of its fields.

    The options of the :class:`Operator` come last. ``errors``, and those of :func:`one_line_errors`, are
    printed as one line each, and the command ends with ``code``.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(run, eval_str=True).parameters.values()
        ordered = sorted(own, key=lambda one: one.annotation is Operator)
        parameters = [leaf.replace(kind=leaf.KEYWORD_ONLY) for one in ordered for leaf in _options(one)]

        @functools.wraps(run)
        def command(**options: Any) -> None:
            with one_line_errors(AdminError, *errors, code=code):
                run(**{one.name: _value(one, options) for one in own})

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _fields(parameter: inspect.Parameter) -> Collection[inspect.Parameter]:
    group: type = parameter.annotation
    return inspect.signature(group, eval_str=True).parameters.values() if is_dataclass(group) else ()


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    fields = _fields(parameter)
    return [leaf for field in fields for leaf in _options(field)] if fields else [parameter]


def _value(parameter: inspect.Parameter, options: Mapping[str, Any]) -> Any:
    fields = _fields(parameter)
    if not fields:
        return options[parameter.name]
    return parameter.annotation(**{field.name: _value(field, options) for field in fields})


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """The values by name of an option that is given as NAME=VALUE. Raises AdminError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise AdminError(f"{option} {text!r}; allowed: NAME=VALUE")
        found[name] = value
    return found


def confirm(question: str, yes: bool) -> None:
    """Ask at a terminal, unless ``yes``."""
    if sys.stdin.isatty() and not yes:
        typer.confirm(question, abort=True, err=True)
