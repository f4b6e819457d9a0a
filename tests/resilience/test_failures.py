"""The closed set of failures: each has a policy, and the documentation says what the policy says."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.failures import POLICIES, BackendFailure, FailureKind, FailurePolicy, HealthEffect, Remedy

DOCS = Path(__file__).resolve().parents[2] / "docs" / "resilience.md"
SAYS = {
    HealthEffect.NOTHING: "nothing",
    HealthEffect.COUNTS_AGAINST: "counts against it",
    HealthEffect.SHRINK_LOAD: "counts against it; gets less load",
    HealthEffect.RESTART_ENGINE: "engine is restarted",
    HealthEffect.MISCONFIGURED: "counts against it; the configuration must be changed",
}
CHANGES = {
    Remedy.NOTHING: "",
    Remedy.SHORTER_CONTEXT: ", shorter context",
    Remedy.OTHER_SEED: ", another seed",
}


def again(policy: FailurePolicy) -> str:
    """Returns the table cell about retries on the same backend."""
    if not policy.retries_same:
        return "no"
    first, longest = f"{policy.first_wait_s:g}", f"{policy.longest_wait_s:g}"
    waits = first if first == longest else f"{first}–{longest}"
    return f"{policy.retries_same}×, {waits} s{CHANGES[policy.retry_with]}"


def row(kind: FailureKind) -> list[str]:
    """Returns the cells of ``kind`` in the documentation, except its meaning."""
    policy = POLICIES[kind]
    return [
        f"`{kind.value}`",
        again(policy),
        "yes" if policy.other_backend else "no",
        "yes" if policy.resumes else "no",
        SAYS[policy.health],
    ]


def test_the_documentation_says_what_the_policies_say_and_what_each_kind_means() -> None:
    assert list(POLICIES) == list(FailureKind)
    text = DOCS.read_text(encoding="utf-8")
    lines = text[text.index("| kind |") :].split("\n\n")[0].splitlines()[2:]
    table = [line.strip("| ").split(" | ") for line in lines]
    assert all(meaning.endswith(".") for _, meaning, *_ in table)
    assert sorted([kind, *effects] for kind, _, *effects in table) == sorted(
        row(kind) for kind in FailureKind
    )


def test_memory_that_ran_out_is_contained_and_a_failing_device_restarts_the_engine() -> None:
    oom, driver = POLICIES[FailureKind.CUDA_OOM], POLICIES[FailureKind.CUDA_DRIVER_ERROR]
    assert (oom.retries_same, oom.health, oom.retry_with) == (
        3,
        HealthEffect.SHRINK_LOAD,
        Remedy.SHORTER_CONTEXT,
    )
    assert (driver.retries_same, driver.health) == (0, HealthEffect.RESTART_ENGINE)


@pytest.mark.parametrize(
    ("kind", "times", "first_s", "longest_s"),
    [
        (FailureKind.CUDA_OOM, 3, 0.1, 5.0),
        (FailureKind.WORKER_RESTARTED, 2, 5.0, 5.0),
        (FailureKind.TIMEOUT, 2, 1.0, 10.0),
        (FailureKind.NAN_OUTPUT, 1, 0.1, 0.1),
    ],
)
def test_retries_and_waits_are_those_of_the_design(
    kind: FailureKind, times: int, first_s: float, longest_s: float
) -> None:
    policy = POLICIES[kind]
    assert (policy.retries_same, policy.first_wait_s, policy.longest_wait_s) == (times, first_s, longest_s)


@pytest.mark.parametrize("kind", FailureKind)
def test_no_policy_contradicts_itself(kind: FailureKind) -> None:
    policy = POLICIES[kind]
    assert policy.first_wait_s <= policy.longest_wait_s
    assert (policy.longest_wait_s > 0) == (policy.retries_same > 0)
    assert policy.retry_with is Remedy.NOTHING or policy.retries_same
    assert policy.other_backend or not policy.resumes
    # What is the request's or the caller's fault must not close a backend to others.
    if not policy.other_backend:
        assert policy.health is HealthEffect.NOTHING


def test_what_a_caller_can_bring_about_never_counts_against_a_backend() -> None:
    for kind in (
        FailureKind.INVALID_INPUT,
        FailureKind.TOKEN_LIMIT_EXCEEDED,
        FailureKind.MODEL_NOT_FOUND,
        FailureKind.DEGENERATE_OUTPUT,
        FailureKind.CANCELLED_BY_CLIENT,
    ):
        assert not BackendFailure(kind, "x").counts


def test_a_dead_engine_does_not_open_the_circuit_of_the_next_one() -> None:
    assert not BackendFailure(FailureKind.ENGINE_DEAD, "x").counts
