"""Shows a replay on the terminal: a line while it runs, tables at the end."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gateway.shadow.statistics import quantile
from ops.cli.console import live_line, table_of
from ops.replay.load import ReplayRun
from ops.replay.report import ReplayReport

RECENT = 100  # number of latest answers that count for the shown TTFT


def progress(console: Console, run: ReplayRun, total: int) -> Live:
    """What shows requests answered and in flight, recent failures and median TTFT while its block runs."""

    def line() -> Text:
        recent = run.outcomes[-RECENT:]
        errors = sum(not outcome.ok for outcome in recent)
        times = sorted(outcome.ttft_s for outcome in recent if outcome.ttft_s is not None)
        ttft = f"{quantile(times, 0.5) * 1000:,.0f} ms" if times else "-"
        ended = f"{len(run.outcomes):,} of {total:,} have ended"
        text = Text(f"{ended}   in flight {run.unfinished:>4}   TTFT p50 {ttft:>9}", style="cyan")
        if errors:
            text.append(f"   {errors} of the last {len(recent)} failed", style="bold red")
        return text

    return live_line(console, line)


def tables(result: ReplayReport, notes: Mapping[str, str]) -> RenderableType:
    head = Table.grid(Column(style="dim"), "", padding=(0, 2))
    for name, text in notes.items():
        head.add_row(name, text)

    shown = ("p50", "p90", "p99", "mean", "max")
    times = table_of("", *shown, right=shown, title="Milliseconds", title_justify="left")
    names = ("TTFT", "TPOT", "total", "client-side delay")
    for name, values in zip(names, result.latency_ms.values(), strict=True):
        times.add_row(name, *(_number(getattr(values, one)) for one in shown))

    run, tokens, slo = result.run, result.tokens, result.slo
    errors, fallbacks, completed = result.counts["errors"], result.counts["fallbacks"], len(result.whole)
    share = tokens.cached_share
    columns = "", Column(justify="right"), Column(style="dim")
    figures = Table(*columns, title="Figures", title_justify="left", show_header=False)
    failed = Text(str(result.error_count), style="bold red" if result.error_count else "green")
    rate, row = result.per_second, figures.add_row
    row("requests", f"{run.sent:,}", f"{completed:,} answered, {run.unfinished:,} aborted")
    row("errors", failed, _listed(errors))
    row("fallbacks", str(sum(fallbacks.values())), _listed(fallbacks))
    row("requests/s", _number(rate(completed)), f"over {run.wall_s:,.1f} s")
    row("tokens/s in", _number(rate(tokens.input)), f"{tokens.input:,}; {tokens.asked_input:,} by the trace")
    row(
        "tokens/s out",
        _number(rate(tokens.output)),
        f"{tokens.output:,}; {tokens.asked_output:,} by the trace",
    )
    row("cached tokens", "-" if share is None else f"{share:.1%}", f"{tokens.cached:,} of the tokens in")
    limits = f"TTFT ≤ {slo.ttft_ms:g} ms, total ≤ {slo.total_ms:g} ms"
    row("goodput/s", _number(rate(result.within_slo)), f"{result.within_slo:,} of {run.sent:,}: {limits}")
    parts: list[RenderableType] = [head, times, figures]
    if run.interrupted:
        parts.append(
            Text("Stopped before the end of the trace; the figures cover what ended.", style="yellow")
        )
    return Group(*parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
