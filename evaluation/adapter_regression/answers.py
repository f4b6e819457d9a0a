"""Greedy answers of the embedded engine with each adapter, and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from engine.build import build_engine
from engine.engine import Engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams, SequenceEnd, SequenceOutput
from evaluation.adapter_regression.checks import AdapterAnswer

# Tokens of every timed answer: the same number for all adapters, even past the end token.
TIMED_TOKENS = 24
IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to the first token, and mean seconds from each token to the next."""

    ttft_s: float
    tpot_s: float


class Bench:
    """An embedded engine in this process, without a prefix cache.

    Args:
        model: the base model's folder.
        adapters: name to folder; ``None`` is the base model alone.
        max_lora_rank: the same as of the gateway's engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path | None],
        *,
        max_lora_rank: int,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._engine: Engine = build_engine(
            EngineConfig(
                model=str(model),
                num_threads=1,
                num_blocks=1_024,
                max_num_seqs=IN_FLIGHT,
                seed=0,
                enable_prefix_caching=False,
                max_loras=max(1, sum(folder is not None for folder in adapters.values())),
                max_lora_rank=max_lora_rank,
            )
        )
        self._ids: dict[str, str | None] = {}
        for name, folder in adapters.items():
            self._ids[name] = None if folder is None else name
            if folder is not None:
                self._engine.install_adapter(name, self._engine.read_adapter(folder))
        self._names = map(str, count())

    def answer_all(
        self, adapter: str, prompts: Mapping[str, tuple[int, ...]], *, max_tokens: int
    ) -> Mapping[str, AdapterAnswer]:
        """Greedy answers by prompt, many in flight at once."""
        waiting, cases, texts = list(prompts.items()), dict[str, str](), dict[str, list[str]]()
        done: dict[str, AdapterAnswer] = {}
        while waiting or self._engine.has_work:
            while waiting and len(cases) - len(done) < IN_FLIGHT:
                case, prompt = waiting.pop(0)
                name = self._begin(adapter, prompt, SamplingParams(max_tokens, temperature=0.0))
                cases[name], texts[case] = case, []
            for output in self._engine.step():
                case = cases[output.request_id]
                texts[case].append(output.text)
                if output.finish_reason is not None:
                    done[case] = AdapterAnswer("".join(texts[case]), output.finish_reason is SequenceEnd.STOP)
        return done

    def time_all(
        self, adapters: Sequence[str], prompts: Mapping[str, tuple[int, ...]], *, rounds: int
    ) -> Mapping[str, Mapping[str, Timing]]:
        """Return the best times of ``rounds`` rounds, by adapter and prompt; one request runs at a time.

        The adapters take turns on each prompt and the first one alternates, so that other load on the machine
        affects all alike. A prompt on which an adapter fails is left out for that adapter.
        """
        best: dict[str, dict[str, Timing]] = {adapter: {} for adapter in adapters}
        for turn in range(rounds):
            for place, (case, prompt) in enumerate(prompts.items()):
                order = adapters if (turn + place) % 2 == 0 else adapters[::-1]
                for adapter in order:
                    timing = self._time(adapter, prompt)
                    if timing is None:
                        continue
                    held = best[adapter].get(case, timing)
                    best[adapter][case] = Timing(
                        min(held.ttft_s, timing.ttft_s), min(held.tpot_s, timing.tpot_s)
                    )
        return best

    def _time(self, adapter: str, prompt: tuple[int, ...]) -> Timing | None:
        began = self._clock()
        self._begin(adapter, prompt, SamplingParams(TIMED_TOKENS, temperature=0.0, ignore_eos=True))
        first: float | None = None
        last: SequenceOutput | None = None
        while self._engine.has_work:
            for output in self._engine.step():
                last = output
                if first is None and output.token_ids:
                    first = self._clock()
        ended = self._clock()
        if first is None or last is None or last.finish_reason is not SequenceEnd.LENGTH:
            return None
        return Timing(first - began, (ended - first) / (TIMED_TOKENS - 1))

    def _begin(self, adapter: str, prompt: tuple[int, ...], sampling: SamplingParams) -> str:
        name = next(self._names)
        self._engine.add(GenerationRequest(name, prompt, sampling, adapter_id=self._ids[adapter]))
        return name
