"""`sluice cost`: compares self-hosting with buying tokens; every input is printed."""

from dataclasses import asdict
from typing import Annotated

import typer

from ops.cli.console import print_json, print_rows, screen
from ops.cli.operator import AsJson, with_options
from ops.planning.build_or_buy import DAYS_A_MONTH, Build, BuildOrBuy, Buy, compare

# Tokens a day: below the first, self-hosting is not worth the work; above the second, it is much cheaper.
BUY_BELOW, BUILD_ABOVE = 10e6, 100e6


@with_options(ValueError, code=2)
def cost(
    tokens_per_day: Annotated[
        float | None,
        typer.Option(help="Input and output tokens a day; default: those of one replica in a full day."),
    ] = None,
    *,
    build: Build,
    buy: Buy,
    as_json: AsJson = False,
) -> None:
    """Compare the cost of self-hosting with that of buying tokens, and show the load at which they are equal.

    The defaults are one worked example (a 72B model in FP8 on two H100 against GPT-4o's list price), at a
    load that keeps the replica busy day and night. Few loads do that: give your own --utilization,
    --usd-per-month and the tokens a second that `sluice replay` measured.

    Example: sluice cost --tokens-per-day 30e6 --utilization 0.35 --usd-per-month 12000 --spare-replicas 1
    """
    found = compare(build, buy, tokens_per_day)
    if as_json:
        print_json(
            {
                "build": asdict(build),
                "buy": asdict(buy) | {"usd_per_million": buy.usd_per_million},
                "result": asdict(found) | {"ratio": found.ratio},
            }
        )
    else:
        _show(build, buy, found)


def _show(build: Build, buy: Buy, found: BuildOrBuy) -> None:
    console = screen()
    cached = "as input" if buy.cached_usd is None else f"{buy.cached_usd:g}"
    inputs = {
        "GPUs per replica": f"{build.gpus} at {build.gpu_usd_per_hour:g} US dollars an hour",
        "a replica serves": f"{build.tokens_per_second:,.0f} tokens/s × {build.utilization:.0%} = "
        f"{build.replica_tokens_per_day / 1e6:,.0f} M a day",
        "fixed costs": f"{build.usd_per_month:,.0f} US dollars a month",
        "spare replicas": build.spare_replicas,
        "bought tokens, US dollars a million": f"input {buy.input_usd:g}, output {buy.output_usd:g}, "
        f"cached {cached}",
        "mix": f"{buy.input_share:.0%} input, {buy.cached_share:.0%} of it cached: "
        f"{buy.usd_per_million:.2f} a million",
    }
    print_rows(("input", "value"), inputs.items(), title="Inputs", title_justify="left")
    million = found.tokens_per_day / 1e6
    costs = (
        (name, replicas, f"{a_day:,.0f}", f"{a_day * DAYS_A_MONTH:,.0f}", f"{a_day / million:,.2f}")
        for name, replicas, a_day in (
            ("build", found.replicas, found.build_usd_per_day),
            ("buy", "", found.buy_usd_per_day),
        )
    )
    headings = ("", "replicas", "a day", "a month", "a million tokens")
    print_rows(headings, costs, title=f"{million:,.1f} M tokens a day", title_justify="left")
    console.print(f"US dollars. Buying costs {found.ratio:.1f} times what building costs.")
    if found.break_even_tokens_per_day is None:
        console.print("A fully loaded replica costs more than buying its tokens: building never pays off.")
    else:
        console.print(
            f"Building pays off from {found.break_even_tokens_per_day / 1e6:,.1f} M tokens a day on."
        )
    console.print(_rule_of_thumb(found), style="dim")


def _rule_of_thumb(found: BuildOrBuy) -> str:
    if BUY_BELOW <= found.tokens_per_day <= BUILD_ABOVE:
        return "Rule of thumb from 10 to 100 M a day: it depends on whether the team can operate it."
    if found.tokens_per_day < BUY_BELOW:
        rule, holds = "Rule of thumb below 10 M a day: buy, it is simpler", found.ratio <= 1.0
    else:
        rule, holds = "Rule of thumb above 100 M a day: host it", found.ratio >= 1.0
    return f"{rule}." if holds else f"{rule}; with these inputs the opposite holds."
