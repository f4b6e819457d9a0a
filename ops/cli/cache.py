"""`sluice cache`: calibrates the response cache's threshold for similar questions."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows, progress_bar
from ops.cli.operator import Operator, command_group, operator_command

cache = command_group("cache", "The response cache: calibrate its threshold.")


@operator_command(cache, "calibrate")
def calibrate(
    gateway: Operator,
    pairs: Annotated[
        Path,
        typer.Option(
            help='JSON lines {"a": "…", "b": "…", "same": true}: questions, and whether they mean the same.'
        ),
    ],
    model: Annotated[str, typer.Option(help="An embedding model that the gateway serves.")],
    precision: Annotated[
        float,
        typer.Option(min=0.5, max=1.0, help="Least share of right answers among the cached answers given."),
    ] = 1.0,
) -> None:
    """Choose the threshold for similar questions from your own pairs (response_cache.similar of a route).

    Pairs with nearly the same words but a different meaning are the most useful. Exit code 1 if no
    threshold reaches the precision.

    Example: sluice cache calibrate --pairs pairs.jsonl --model BAAI/bge-m3
    """
    from gateway.shadow.statistics import wilson
    from ops.similar_pairs import EMBED_TIMEOUT_S, JudgedPairs, embedded, read_pairs, unique_texts

    judged = read_pairs(pairs)
    with progress_bar() as bar:
        task = bar.add_task("questions embedded", total=len(unique_texts(judged)))
        vectors = embedded(
            gateway.client(EMBED_TIMEOUT_S), model, judged, lambda count: bar.advance(task, count)
        )
    found = JudgedPairs(judged, vectors)
    proposed = found.propose(precision)
    at_most = None if proposed is None else wilson(proposed.wrong, found.different).high
    answer = {
        "model": model,
        "same": found.same,
        "different": found.different,
        "other_numbers": {"same": found.never[True], "different": found.never[False]},
        "thresholds": [asdict(one) for one in found.table(proposed)],
        "proposed": None if proposed is None else asdict(proposed),
        "wrong_at_most": at_most,
    }
    gateway.show(answer, lambda _: _print(answer, precision))
    if proposed is None:
        raise typer.Exit(1)


def _print(answer: dict[str, Any], precision: float) -> None:
    proposed = answer["proposed"]
    rows = (
        (
            f"{one['threshold']:.3f}{' *' if one == proposed else ''}",
            f"{one['precision']:.3f}",
            f"{one['recall']:.3f}",
            f"{one['right']}/{answer['same']}",
            f"{one['wrong']}/{answer['different']}",
        )
        for one in answer["thresholds"]
    )
    right = ("precision", "recall", "right", "wrong")
    print_rows(("threshold", *right), rows, right=right)
    never = answer["other_numbers"]
    if any(never.values()):
        print_lines(
            f"Never similar, because their numbers differ: {never['same']} of the pairs with one meaning, "
            f"{never['different']} of those with different meanings.",
        )
    if proposed is None:
        print_lines(
            f"No threshold that finds a pair has a precision of {precision:g}: "
            "give more pairs, or a lower --precision."
        )
        return
    print_lines(
        f"Proposed: {proposed['threshold']:.3f}. It treats at most "
        f"{answer['wrong_at_most']:.1%} of different pairs as the same (95 % confidence, "
        f"from {answer['different']} pairs).",
        f"response_cache: {{similar: {{model: {answer['model']}, threshold: {proposed['threshold']:.3f}}}}}",
    )
