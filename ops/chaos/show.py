"""Shows a run on the terminal: a line while it runs, tables at the end."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ops.chaos.report import ChaosReport
from ops.chaos.request_outcome import RequestOutcome
from ops.chaos.run import ChaosRun
from ops.chaos.scenario import NEVER, Verdict
from ops.cli.console import live_line, table_of

COLUMNS = (
    "request", "mode", "sent s", "first s", "pause s", "end s", "faults", "answered by", "fallback",
    "resumed", "tokens", "billed", "±chars", "verdict", "reason",
)  # fmt: skip
# Most rows shown; the counts include the others.
MOST_ROWS = 60
_STYLES = {
    Verdict.WHOLE: "green",
    Verdict.RESUMED: "green",
    Verdict.LOST: "bold red",
    Verdict.WRONG: "bold red",
}


def progress(console: Console, run: ChaosRun) -> Live:
    """What shows ``run`` while its block runs."""

    def line() -> RenderableType:
        faults = run.report.injected
        last = f"   last fault: {faults[-1].label}" if faults else ""
        return f"{run.now_s():6.1f} s   {len(run.observed)} of {run.sent} sent have ended{last}"

    return live_line(console, line)


def tables(report: ChaosReport, *, every: bool = False) -> RenderableType:
    """The result as tables; of many requests only those not ``whole`` are shown, unless ``every``."""
    parts: list[RenderableType] = [Text(report.scenario.about, style="bold"), _faults(report)]
    shown, most = report.outcomes, len(report.outcomes) if every else MOST_ROWS
    if len(shown) > most:
        shown = [outcome for outcome in shown if outcome.verdict is not Verdict.WHOLE]
    parts.append(_requests(shown[:most]))
    if (left := len(shown) - most) > 0:
        parts.append(Text(f"{left} more; --every shows all, --json has all", style="dim"))
    parts.append(_figures(report))
    if report.ok:
        parts.append(Text("No request was lost or wrong.", style="bold green"))
    parts.extend(Text(f"✗ {problem}", style="bold red") for problem in report.problems)
    return Group(*parts)


def _faults(report: ChaosReport) -> Table:
    times = ("detected after s", "some backend after s", "ready after s")
    table = table_of(
        "at s", "action", *times, "checks that failed",
        right=("at s", *times), title="Faults", title_justify="left",
    )  # fmt: skip
    recoveries = report.recoveries()
    for one in report.injected[:MOST_ROWS]:
        cells: tuple[str, ...] = ()
        if (found := recoveries.get(one)) is not None:
            seconds = map(_seconds, (found.down_s, found.back_s, found.ready_s))
            cells = (*seconds, ", ".join(sorted(found.checks)) or "-")
        table.add_row(f"{one.at_s:.2f}", one.label, *cells)
    return table


def _requests(outcomes: list[RequestOutcome]) -> Table:
    table = table_of(*COLUMNS, title="Requests", title_justify="left")
    for outcome in outcomes:
        table.add_row(
            outcome.request_id.split("-", 2)[-1],
            "stream" if outcome.stream else "whole",
            f"{outcome.sent_s:.2f}",
            _seconds(outcome.first_s),
            f"{outcome.longest_pause_s:.2f}" if outcome.stream else "-",
            _seconds(outcome.ended_s),
            ", ".join(outcome.met) or "-",
            outcome.backend or outcome.code or "-",
            outcome.fallback or "-",
            ", ".join(outcome.seams or ()) or "-",
            "-" if outcome.tokens is None else str(outcome.tokens),
            "-" if outcome.billed is None else str(outcome.billed),
            f"+{outcome.duplicated} −{outcome.missing}" if outcome.duplicated or outcome.missing else "0",
            Text(outcome.verdict, style=_STYLES.get(outcome.verdict, "yellow")),
            outcome.why,
        )
    return table


def _figures(report: ChaosReport) -> Table:
    table = table_of("", "value", right=("value",), title="Figures", title_justify="left", show_header=False)
    table.add_row("requests", f"{len(report.outcomes):,} in {report.wall_s:,.1f} s")
    for verdict in Verdict:
        count = report.verdicts.get(verdict, 0)
        if count or verdict in NEVER:
            table.add_row(f"  {verdict}", f"{count:,}")
    for name, value in report.reported.items():
        table.add_row(name, f"{value:,.0f}")
    before, after = report.before, report.after
    if before is not None and after is not None:
        for name in ("threads", "descriptors", "children"):
            table.add_row(f"{name} before, after", f"{getattr(before, name)}, {getattr(after, name)}")
        table.add_row("resident MiB before, after", f"{before.rss_mib:,.0f}, {after.rss_mib:,.0f}")
    if report.at_rest is not None:
        table.add_row("requests, sequences and blocks released", "yes" if report.at_rest else "NO")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
