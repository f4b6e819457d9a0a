"""Measures the token count of each word with the gateway, so that prompts have exactly the wanted lengths."""

from dataclasses import replace

from ops.replay.contract import ReplayContract
from ops.replay.options import ReplayError
from ops.replay.shape import Planned
from ops.replay.target import ReplayTarget
from ops.replay.text import UNCALIBRATED, WORDS, Lexicon
from resilience.task_groups import all_or_error

# Each word is counted this many times in a row, after another word, so that the text's ends do not matter.
REPEATS = 8
# Calls in flight; a gateway answers about 100 of them in well under a second.
PARALLEL = 8
ANCHOR = WORDS[0]
PROBE_WORDS = 16  # the probe's length in words
# For a gateway that does not report its length; also the default of the engine's configuration.
DEFAULT_MODEL_LEN = 4_096


async def calibrate(target: ReplayTarget, contract: ReplayContract) -> tuple[Lexicon, int]:
    """Count the words' tokens with ``/tokenize``, then send one short request for its prompt's overhead.

    Returns the words, and the gateway's ``max_model_len`` or the default. The probe also opens the first
    connection and checks key, route and model before the load begins. Raises ReplayError.
    """
    anchor = await target.tokenize({"prompt": ANCHOR, "add_special_tokens": False})
    costs = None if anchor is None else await _weigh(target, anchor.count)
    lexicon = UNCALIBRATED if costs is None else Lexicon(costs, calibrated=True)
    weight, words = dict(lexicon.costs), WORDS[:PROBE_WORDS]
    asked = Planned(index=-1, due_s=0.0, prompt_tokens=PROBE_WORDS, max_tokens=1)
    probe = await target.generate(contract, asked, " ".join(words), started_at=0.0)
    if not probe.ok:
        raise ReplayError(f"the first request failed with {probe.code}; nothing was replayed")
    overhead = max(0, probe.input_tokens - sum(weight[word] for word in words)) if lexicon.calibrated else 0
    longest = anchor.max_model_len if anchor is not None else None
    return replace(lexicon, overhead=overhead), longest or DEFAULT_MODEL_LEN


async def _weigh(target: ReplayTarget, anchor_tokens: int) -> tuple[tuple[str, int], ...] | None:
    weighed: dict[str, int] = {}
    waiting = iter(WORDS)

    async def worker() -> None:
        for word in waiting:
            text = " ".join([ANCHOR, *([word] * REPEATS)])
            reported = await target.tokenize({"prompt": text, "add_special_tokens": False})
            if reported is not None:
                weighed[word] = max(1, round((reported.count - anchor_tokens) / REPEATS))

    async with all_or_error() as group:
        for _ in range(PARALLEL):
            group.create_task(worker())
    if len(weighed) < len(set(WORDS)):
        return None
    return tuple((word, weighed[word]) for word in WORDS)
