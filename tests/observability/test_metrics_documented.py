"""``docs/metrics.md`` and the code have the same metrics."""

from __future__ import annotations

from tests.observability.families import documented, families, named_in_the_code


def test_every_family_stands_in_the_document_with_its_type_and_labels() -> None:
    there = families()
    assert len(there) > 80
    assert {name: family for name, family in there.items() if documented().get(name) != family} == {}


def test_the_document_names_nothing_that_is_not_there() -> None:
    assert set(documented()) - set(families()) == set()


def test_every_name_in_the_code_is_among_the_families() -> None:
    there = families()
    known = {
        name for full in there for name in (full, full.removesuffix("_total"), full.removesuffix("_info"))
    }
    assert named_in_the_code() - known == set()
