"""A report as one self-contained HTML page: tables, and plots as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ops.shadow.tables import HEADER, UNITS, lines, rows, title

_WIDTH, _HEIGHT, _MARGIN = 520, 260, 46
# Distinct in print and for readers with red-green colour blindness.
_PRIMARY, _SHADOW = "#0b5394", "#e69138"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 2rem}th,td{padding:.25rem .8rem;border-bottom:1px solid #ddd}
td{text-align:right;font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:left}
figure{display:inline-block;margin:0 1.5rem 1.5rem 0}figcaption{font-weight:600}
svg text{font:11px system-ui,sans-serif;fill:#444}
"""


def page(report: Mapping[str, Any]) -> str:
    """The page; every name in it is escaped."""
    return "\n".join(
        (
            "<!doctype html><html lang=en><meta charset=utf-8><title>Shadow report</title>",
            f"<style>{_STYLE}</style><h1>Shadow report</h1>",
            *(_head(report) if report["pairs"] else ("<p>No pairs yet.</p>",)),
            *_plots(report),
            *(_group(group) for group in report["groups"]),
            "<p>Intervals are of 95 %: Wilson's for shares, a bootstrap over pairs for means and"
            " differences. A difference whose interval holds 0 may be chance.</p></html>\n",
        )
    )


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    for line in lines(report):
        yield f"<p>{escape(line)}</p>"
    yield (
        f"<p><b style='color:{_PRIMARY}'>&#9632; primary</b> &nbsp;"
        f"<b style='color:{_SHADOW}'>&#9632; shadow</b></p>"
    )


def _plots(report: Mapping[str, Any]) -> Iterator[str]:
    shares = report["quantiles"]["shares"]
    for name in ("ttft_ms", "total_ms", "output_tokens"):
        found = report["quantiles"][name]
        if found is not None:
            yield _figure(
                f"{UNITS[name][0]}: share of answers within",
                _curves(shares, found["primary"], found["shadow"]),
            )
    for group in report["groups"][:1]:
        if group["checks"]:
            yield _figure("share of answers that pass, with intervals", _bars(group["checks"]))


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _curves(shares: Sequence[float], primary: Sequence[float], shadow: Sequence[float]) -> str:
    """Draw two distribution functions."""
    most = max(*primary, *shadow) or 1.0

    def point(value: float, share: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * value / most
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share
        return f"{x:.1f},{y:.1f}"

    def curve(values: Sequence[float], colour: str) -> str:
        points = " ".join(point(value, share) for value, share in zip(values, shares, strict=True))
        return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>"

    marks = "".join(
        f"<text x='{_MARGIN + (_WIDTH - 2 * _MARGIN) * part:.0f}' y='{_HEIGHT - _MARGIN + 16}'"
        f" text-anchor='middle'>{most * part:.4g}</text>"
        for part in (0.0, 0.5, 1.0)
    )
    grid = "".join(
        f"<line x1='{_MARGIN}' x2='{_WIDTH - _MARGIN}' y1='{point(0, part).split(',')[1]}'"
        f" y2='{point(0, part).split(',')[1]}' stroke='#ddd'/>"
        f"<text x='{_MARGIN - 6}' y='{point(0, part).split(',')[1]}' text-anchor='end'>{part:.0%}</text>"
        for part in (0.0, 0.5, 1.0)
    )
    return _svg(_HEIGHT, grid + marks + curve(primary, _PRIMARY) + curve(shadow, _SHADOW))


def _bars(checks: Sequence[Mapping[str, Any]]) -> str:
    """Draw both shares of each check as points, with their intervals."""
    row, left = 34, 110
    drawn = []
    for number, check in enumerate(checks):
        y = 20 + row * number
        drawn.append(f"<text x='{left - 8}' y='{y + 8}' text-anchor='end'>{escape(check['check'])}</text>")
        for side, colour, shift in (("primary", _PRIMARY, 0), ("shadow", _SHADOW, 10)):
            low, mean, high = (
                left + (_WIDTH - left - 20) * check[side][part] for part in ("low", "mean", "high")
            )
            drawn.append(
                f"<line x1='{low:.1f}' x2='{high:.1f}' y1='{y + shift}' y2='{y + shift}'"
                f" stroke='{colour}' stroke-width='2'/>"
                f"<circle cx='{mean:.1f}' cy='{y + shift}' r='4' fill='{colour}'/>"
            )
    height = 40 + row * len(checks)
    for part in (0.0, 0.5, 1.0):
        x = left + (_WIDTH - left - 20) * part
        drawn.insert(0, f"<line x1='{x}' x2='{x}' y1='8' y2='{height - 24}' stroke='#ddd'/>")
        drawn.append(f"<text x='{x}' y='{height - 8}' text-anchor='middle'>{part:.0%}</text>")
    return _svg(height, "".join(drawn))


def _svg(height: int, inside: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{_WIDTH}' height='{height}'"
        f" viewBox='0 0 {_WIDTH} {height}'>{inside}</svg>"
    )


def _group(group: Mapping[str, Any]) -> str:
    table = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in HEADER) + "</tr>"
    for cells in rows(group):
        table += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f"<h2>{escape(title(group))}</h2><table>{table}</table>"
