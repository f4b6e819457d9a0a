"""`sluice rollout check`: runs the rollout checklist against a live gateway."""

from dataclasses import asdict

import typer

from ops.cli.console import print_findings, print_json, print_lines
from ops.cli.operator import Operator, command_group, operator_command
from ops.cli.startup import one_line_errors
from ops.client import AdminError
from ops.rollout.options import RolloutOptions

rollout = command_group("rollout", "The rollout checklist, run against a live gateway.")


@operator_command(rollout, "check")
def check(gateway: Operator, options: RolloutOptions) -> None:
    """Run the checklist; exit code 1 if a check is wrong.

    A check that the gateway itself cannot answer is `manual`, and names the file or option that answers it.
    The command takes a few seconds: every backend generates a few tokens.

    Example: sluice rollout check --prometheus http://127.0.0.1:9090 --replay replay.json --grace 180
    """
    from ops.rollout.checks import CheckVerdict, examine
    from ops.rollout.facts import gather

    with one_line_errors(AdminError, code=2):
        facts = gather(gateway.client(), options)
    findings = examine(facts)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in CheckVerdict}
    wrong = counts[CheckVerdict.WRONG]
    if gateway.as_json:
        print_json({"ok": not wrong, "checks": [asdict(finding) for finding in findings]})
        raise typer.Exit(1 if wrong else 0)
    colours = {CheckVerdict.OK: "green", CheckVerdict.WRONG: "red", CheckVerdict.MANUAL: "yellow"}
    print_findings((colours[one.verdict], one.verdict, one.check, one.found, one.hint) for one in findings)
    print_lines(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}.")
    raise typer.Exit(1 if wrong else 0)
