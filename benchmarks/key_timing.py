"""Whether the time of refusing a key reveals how much of it is right.

    python -m benchmarks.key_timing

Wrong keys of one length and four kinds are sent in random order: with an unknown prefix, with a known prefix
and another secret, right but for the last character, and not in the format of Sluice's keys. There are many
of each kind, since two keys of one kind also differ by some nanoseconds. Their times are compared with those
of the first kind by the difference of means and its 99.9 % interval (Welch), without the slowest tenth of
each: once for the key ring alone, in this process, and once for whole requests over one connection. When the
interval includes zero, no difference was found.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from accounting.keys import CallerRole, KeyRecord, KeyRing, StoredKey, draw_key
from gateway.keys.authenticate import Keys
from gateway.testing import fake_services, serving

# 99.9 % of a normal distribution lie within this many standard deviations.
Z999 = 3.29
KEPT = 0.9
MADE = 1_000
KINDS = ("unknown prefix", "known prefix", "all but the last character", "no form of ours")


def ring_and_keys() -> tuple[KeyRing, Mapping[str, Sequence[str]]]:
    """Return a ring of many keys, and wrong keys by what is right in them."""
    ring = KeyRing("sk-admin-0123456789", enabled=True)
    wrong: dict[str, list[str]] = {name: [] for name in KINDS}
    for number in range(MADE):
        new = draw_key()
        record = KeyRecord("acme", CallerRole.CALLER, f"key_{number}", 0)
        ring.add(StoredKey(record, new.prefix, new.salt, new.digest))
        head, _, secret = new.key.rpartition("_")
        other = draw_key().key
        last = "0" if secret[-1] != "0" else "1"
        made = (
            other,
            f"{head}_{other.rpartition('_')[2]}",
            f"{head}_{secret[:-1]}{last}",
            f"{number:x}".rjust(len(other), "x"),
        )
        for name, key in zip(KINDS, made, strict=True):
            wrong[name].append(key)
    return ring, wrong


def by_turns(
    act: Callable[[str], None], keys: Mapping[str, Sequence[str]], turns: int
) -> dict[str, list[float]]:
    """Return the seconds of each call by kind; the order is random, so that no drift favours a kind."""
    rng, took = random.Random(0), {name: [0.0] * 0 for name in keys}
    names = list(keys)
    for _ in range(turns):
        rng.shuffle(names)
        for name in names:
            key = rng.choice(keys[name])
            begun = time.perf_counter()
            act(key)
            took[name].append(time.perf_counter() - begun)
    return took


def compared(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the difference of means and half of its interval, without the slowest values."""
    kept = [sorted(values)[: int(len(values) * KEPT)] for values in (one, other)]
    spread = math.sqrt(sum(statistics.variance(values) / len(values) for values in kept))
    return statistics.fmean(kept[0]) - statistics.fmean(kept[1]), Z999 * spread


def show(console: Console, title: str, took: Mapping[str, Sequence[float]]) -> None:
    """Print one table."""
    table = Table("what is right", "median µs", "difference ns", "99.9 %", "seen", title=title)
    first = next(iter(took.values()))
    for name, values in took.items():
        gap, half = compared(values, first)
        shown = "" if values is first else f"{gap * 1e9:+.0f}"
        seen = "" if values is first else "yes" if abs(gap) > half else "no"
        table.add_row(name, f"{statistics.median(values) * 1e6:.2f}", shown, f"± {half * 1e9:.0f}", seen)
    console.print(table)


def main(
    ring_turns: Annotated[int, typer.Option(min=100)] = 100_000,
    request_turns: Annotated[int, typer.Option(min=100)] = 10_000,
) -> None:
    """Measure and print."""
    ring, keys = ring_and_keys()
    console = Console()

    def look(key: str) -> None:
        ring.lookup(key)

    look(keys[KINDS[0]][0])
    load = f"load average {os.getloadavg()[0]:.1f}"
    show(console, f"the ring, {ring_turns} each, {load}", by_turns(look, keys, ring_turns))
    with serving(fake_services(keys=Keys(ring))) as url:
        host, port = url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port))

        def ask(key: str) -> None:
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 401:
                raise RuntimeError(f"answered {answer.status}")

        show(console, f"whole requests, {request_turns} each, {load}", by_turns(ask, keys, request_turns))
        connection.close()


if __name__ == "__main__":
    typer.run(main)
