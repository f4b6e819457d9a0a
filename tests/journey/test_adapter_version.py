"""The version that answered is the same in the answer, the trace, the metrics and the ledger."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest

from adapters.catalogue import AdapterState, Alias
from adapters.selection import AdapterOffer
from adapters.values import Adapter
from gateway.contracts.values import GenerateRequest
from observability.attributes import attributes
from observability.metrics import Metrics
from tests.journey.rig import JourneyRig

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
OLD, NEW = (Adapter(f"manga_domain_v{n}", n, "scripted", f"adapters/{n}") for n in (3, 4))


def offer(target: Adapter) -> AdapterOffer:
    """Returns an offer of both versions, with the alias on ``target``."""
    return AdapterOffer(
        MappingProxyType({one.adapter_id: one for one in (OLD, NEW)}),
        MappingProxyType({one.adapter_id: AdapterState.ACTIVE for one in (OLD, NEW)}),
        MappingProxyType({"manga_domain": Alias("manga_domain", target.adapter_id)}),
    )


@pytest.mark.parametrize(
    ("named", "version"),
    [
        (None, "scripted"),
        ("manga_domain_v4", "scripted+manga_domain_v4"),
        ("manga_domain", "scripted+manga_domain_v3"),
    ],
)
async def test_the_version_that_answered_is_told_everywhere_and_never_the_alias(
    build_rig: Build, ask: Ask, named: str | None, version: str
) -> None:
    rig = build_rig(adapters=[OLD, NEW])
    rig.adapters.offer(offer(OLD))
    answer = (await rig.run(ask(adapter_id=named))).answer
    assert answer is not None and answer.backend_version == version
    [record] = rig.records
    found = attributes(record)
    assert found["sluice.backend_version"] == found["gen_ai.response.model"] == version
    assert found.get("sluice.adapter") == version.partition("+")[2] or named is None
    [row] = rig.outbox.rows
    assert row.backend_version == version
    metrics = Metrics(version="1")
    metrics.request(record)
    assert f'sluice_answers_total{{backend_version="{version}"}} 1.0' in metrics.render().decode()


async def test_an_alias_that_moves_shows_its_new_version_with_the_next_answer(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(adapters=[OLD, NEW])
    versions = []
    for target in (OLD, NEW, OLD):
        rig.adapters.offer(offer(target))
        answer = (await rig.run(ask(adapter_id="manga_domain"))).answer
        assert answer is not None
        versions.append(answer.backend_version)
    assert versions == [f"scripted+manga_domain_v{n}" for n in (3, 4, 3)]
    assert [row.backend_version for row in rig.outbox.rows] == versions
