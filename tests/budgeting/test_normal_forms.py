"""Normal forms of callers' texts: as Python's, in time that grows with the length alone."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.duplicates import same_text
from budgeting.normal_forms import MAX_RUN, normalized
from gateway.prompts.canonical import normalize
from gateway.shadow.checks import ungrounded

# Marks that are sorted, join, or hide in other characters; and what stands between them.
TELLING = "ae\n か가각ｶﾞ⻝﨎ﷺÅΩ\u0301\u0316\u0345\u3099\u0f73\u1161\u11a8，ＡÄ漢"


@given(st.text(st.sampled_from(TELLING) | st.characters(exclude_categories=("Cs",)), max_size=60))
@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_text_gets_the_same_normal_form_as_from_python(form: Literal["NFC", "NFKC"], text: str) -> None:
    assert normalized(form, text) == unicodedata.normalize(form, text)


def test_a_run_that_no_language_writes_stays_as_it_is_and_the_text_around_it_does_not() -> None:
    run = "\u0345\u0316" * (MAX_RUN // 2)
    assert normalized("NFC", f"A\u030a a{run} A\u030a") == f"Å a{run} Å"
    assert normalize(normalize(run)) == normalize(run)


@pytest.mark.parametrize("read", [same_text, normalize, lambda text: ungrounded("1,000", text)])
def test_a_text_of_marks_alone_does_not_stop_the_process(read: Callable[[str], object]) -> None:
    """Python took 4 s for 16,000 marks, and 400 s for 160,000; other threads did not run meanwhile."""
    began = time.perf_counter()
    read("a" + "\u0345" * 80_000 + "\u0316" * 80_000)
    read(("a" + "\u0345" * 100 + "\u0316" * 100) * 500)
    assert time.perf_counter() - began < 60
