from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.replay.sse import MAX_EVENT_BYTES, EventSplitter, EventTooLarge

STREAM = b'data: {"a":"\xe6\xbc\xab"}\n\n: ping\n\nevent: x\ndata:1\ndata: 2\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":"\xe6\xbc\xab"}', b"1\n2", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20), st.booleans())
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int], crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter()
    found = [event for start, end in pairwise(edges) for event in splitter.feed(stream[start:end])]
    assert found == EVENTS


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    splitter = EventSplitter()
    with pytest.raises(EventTooLarge):
        for _ in range(MAX_EVENT_BYTES // 65_536 + 2):
            list(splitter.feed(b"x" * 65_536))
