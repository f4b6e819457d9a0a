"""Ask the demo model the held-out questions: ``python -m evaluation.demo_eval --model models/demo``.

Every question has a regular expression that a right answer must match. Answers are greedy. The answer to a
Japanese question must also have Japanese characters.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.shadow.language import has_japanese

QUESTIONS = Path(__file__).with_name("demo_questions.jsonl")


@dataclass(frozen=True)
class DemoQuestion:
    """One held-out conversation, ending with the user, and the pattern its answer must match."""

    id: str
    topic: str
    language: str
    expect: str
    messages: list[dict[str, str]]

    def accepts(self, answer: str) -> bool:
        """True where the answer matches the pattern, in the question's language."""
        if self.language == "ja" and not has_japanese(answer):
            return False
        return re.search(self.expect, answer, re.IGNORECASE) is not None


@dataclass(frozen=True)
class DemoAnswer:
    """The model's answer to one question; ``ended`` is true where it stopped by itself."""

    id: str
    topic: str
    question: str
    answer: str
    passed: bool
    ended: bool


def load_questions(path: Path = QUESTIONS) -> list[DemoQuestion]:
    """The held-out questions, in file order."""
    with path.open(encoding="utf-8") as handle:
        return [DemoQuestion(**json.loads(line)) for line in handle if line.strip()]


def answer_all(
    model: Any,
    tokenizer: Any,
    questions: Sequence[DemoQuestion],
    max_new_tokens: int = 96,
    batch_size: int = 20,
) -> list[DemoAnswer]:
    """Greedy answers, in batches of similar prompt length, returned in the order of the questions."""
    prompts = {
        question.id: tokenizer.apply_chat_template(
            question.messages, tokenize=False, add_generation_prompt=True
        )
        for question in questions
    }
    ordered = sorted(questions, key=lambda question: len(prompts[question.id]))
    outcomes: dict[str, DemoAnswer] = {}
    for batch in _chunks(ordered, batch_size):
        inputs = tokenizer(
            [prompts[question.id] for question in batch],
            return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
        for question, row in zip(batch, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            answer = tokenizer.decode(row, skip_special_tokens=True).strip()
            outcomes[question.id] = DemoAnswer(
                id=question.id,
                topic=question.topic,
                question=question.messages[-1]["content"],
                answer=answer,
                passed=question.accepts(answer),
                ended=tokenizer.eos_token_id in row,
            )
    return [outcomes[question.id] for question in questions]


def _chunks(questions: Sequence[DemoQuestion], size: int) -> Iterator[Sequence[DemoQuestion]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def summary(outcomes: Sequence[DemoAnswer]) -> dict[str, Any]:
    """Counts per topic and overall: passed, ended by the model itself, distinct answers."""
    topics: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for outcome in outcomes:
        topics[outcome.topic][0] += outcome.passed
        topics[outcome.topic][1] += 1
    return {
        "topics": {topic: {"passed": passed, "asked": asked} for topic, (passed, asked) in topics.items()},
        "passed": sum(outcome.passed for outcome in outcomes),
        "asked": len(outcomes),
        "ended": sum(outcome.ended for outcome in outcomes),
        "distinct_answers": len({outcome.answer for outcome in outcomes}),
    }


def load_model(folder: Path, dtype: str = "float32", adapter: Path | None = None) -> tuple[Any, Any]:
    """The model and its tokenizer, ready to answer; ``dtype`` is float32 or bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if adapter is not None:
        from peft import PeftModel  # takes seconds to import

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model, tokenizer


def _print_report(outcomes: Sequence[DemoAnswer], seconds: float, failures: bool) -> None:
    console = Console()
    report = summary(outcomes)
    table = Table("topic", "passed", "asked", title="Held-out questions")
    for topic, counts in report["topics"].items():
        table.add_row(topic, str(counts["passed"]), str(counts["asked"]))
    table.add_section()
    table.add_row("total", str(report["passed"]), str(report["asked"]))
    console.print(table)
    console.print(
        f"ended by the model: {report['ended']} of {report['asked']}   "
        f"distinct answers: {report['distinct_answers']}   {seconds:.1f} s"
    )
    if failures:
        for outcome in outcomes:
            if not outcome.passed:
                console.print(
                    f"\n{outcome.id}: {outcome.question}\n  {outcome.answer}", markup=False, highlight=False
                )


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command line."""
    cli = argparse.ArgumentParser(
        prog="evaluation.demo_eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument(
        "--model", type=Path, default=Path("models/demo"), help="folder of the model (default: %(default)s)"
    )
    cli.add_argument("--adapter", type=Path, default=None, help="folder of a LoRA adapter to answer with")
    cli.add_argument("--questions", type=Path, default=QUESTIONS, help="file of questions (default: the 100)")
    cli.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="arithmetic (default: %(default)s)",
    )
    cli.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    cli.add_argument("--json", action="store_true", help="print the counts and every answer as JSON")
    cli.add_argument("--failures", action="store_true", help="also print the questions that failed")
    args = cli.parse_args(argv)
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, args.dtype, args.adapter)
    began = time.monotonic()
    outcomes = answer_all(model, tokenizer, load_questions(args.questions))
    seconds = time.monotonic() - began
    if args.json:
        data = summary(outcomes) | {"answers": [asdict(outcome) for outcome in outcomes]}
        print(json.dumps(data, ensure_ascii=False, indent=2))
    else:
        _print_report(outcomes, seconds, args.failures)


if __name__ == "__main__":
    main()
