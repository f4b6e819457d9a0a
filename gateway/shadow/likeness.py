"""Computes the similarity of two answers by characters (chrF)."""

import time
from collections import Counter

# chrF (Popović 2015): n-grams of 1 to 6 characters; recall weighs four times as much as precision.
MAX_ORDER = 6
BETA = 2.0
# Only the beginning of longer answers is compared: 7 ms for two of this length, in steps of about 1 ms.
MAX_CHARS = 1_500
PAUSE_S = 0.0002  # long enough for another thread to get the interpreter lock


def chrf(reference: str, given: str) -> float:
    """Return the chrF score of ``given``, 0 to 1, without white space; 1 for two empty texts."""
    wanted = "".join(reference.split())[:MAX_CHARS]
    found = "".join(given.split())[:MAX_CHARS]
    if not wanted or not found:
        return float(wanted == found)
    precision = recall = orders = 0.0
    for order in range(1, MAX_ORDER + 1):
        left, right = _runs(wanted, order), _runs(found, order)
        if not left and not right:
            break
        same = sum((left & right).values())
        precision += same / max(1, sum(right.values()))
        recall += same / max(1, sum(left.values()))
        orders += 1
        yield_thread()
    precision, recall = precision / orders, recall / orders
    if not precision + recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def yield_thread() -> None:
    """Let another thread run between two steps, so that the event loop waits for at most one step.

    A sleep of 0 is not enough: this thread takes the interpreter lock again before the other one wakes up,
    which then waits 5 ms for it.
    """
    time.sleep(PAUSE_S)


def _runs(text: str, order: int) -> Counter[str]:
    return Counter(text[place : place + order] for place in range(len(text) - order + 1))
