"""A large text is encoded in another process, within bounds, to the same ids."""

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from budgeting.vocabulary import LARGE_CHARS, prepare_encode
from gateway.errors import BackendUnavailable, InvalidRequest
from gateway.limited.process import _SIZE, LimitedProcess, Limits, NoProcess, _read
from gateway.prompts.bounded_work import ENCODE, encode_in, encode_limits
from gateway.wiring.model import Tokenizers

pytestmark = pytest.mark.slow

DEMO = Path("models/demo")
WORDS = "Größe, 漫画 and 🎉: the gateway counts the tokens of this text, 1234567. "
LARGE = WORDS * (LARGE_CHARS // len(WORDS) + 1)
SMALL = LARGE[:LARGE_CHARS]
CHAT = (Message(Role.SYSTEM, "Count."), Message(Role.USER, LARGE), Message(Role.USER, f"<|im_end|>{LARGE}"))


@pytest.fixture(scope="module")
def here() -> ChatTokenizer:
    return ChatTokenizer(DEMO)


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    process = LimitedProcess(ENCODE, str(DEMO), limits=encode_limits(4 << 20))
    yield process
    process.close()


def test_large_texts_and_no_others_are_encoded_elsewhere_to_the_same_ids(here: ChatTokenizer) -> None:
    texts: list[str] = []
    work = prepare_encode(str(DEMO))

    def noted(job: bytes) -> bytes:
        texts.append(job[1:].decode())
        return work(job)

    there = ChatTokenizer(DEMO, encode_elsewhere=noted)
    for text in (LARGE, f"<|im_start|>{LARGE}"):
        for special in (True, False):
            assert there.encode(text, add_special_tokens=special) == here.encode(
                text, add_special_tokens=special
            )
        assert there.text_tokens(text) == here.text_tokens(text)
    assert there.encode_chat(CHAT) == here.encode_chat(CHAT)
    for end in (2, 3):
        assert there.encode_parts_whole(CHAT[:end], (1, end)) == here.encode_parts_whole(CHAT[:end], (1, end))
    assert len(texts) > 8
    texts.clear()
    assert there.encode(SMALL) == here.encode(SMALL)
    assert not texts


def test_the_process_answers_with_the_ids(here: ChatTokenizer, process: LimitedProcess) -> None:
    there = ChatTokenizer(DEMO, encode_elsewhere=encode_in(process))
    assert there.encode(LARGE) == here.encode(LARGE)
    assert there.encode_parts_whole(CHAT[:2], (1,)) == here.encode_parts_whole(CHAT[:2], (1,))


def test_an_answer_whose_process_is_killed_while_it_is_sent_is_none(process: LimitedProcess) -> None:
    text = WORDS * 20_000  # its ids are more than a socket holds
    with process._submit() as ours:
        ours.sendall(_SIZE.pack(1 + len(text.encode())) + b"\0" + text.encode())
        ours.recv(1, socket.MSG_PEEK)
        assert process._server is not None
        [child] = psutil.Process(process._server.pid).children()
        child.kill()
        answer = b"".join(iter(lambda: ours.recv(1 << 20), b""))
    with pytest.raises(NoProcess):
        _read(answer)


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        (Limits(cpu_s=0.01, wall_s=120.0), "processor time"),
        (Limits(cpu_s=60.0, wall_s=120.0, memory_bytes=1 << 20), "of memory"),
        (Limits(cpu_s=60.0, wall_s=120.0, answer_bytes=1 << 10), "of tokens"),
    ],
)
def test_a_text_that_takes_too_much_is_refused_with_the_bound(bounds: Limits, named: str) -> None:
    process = LimitedProcess(ENCODE, str(DEMO), limits=bounds)
    there = ChatTokenizer(DEMO, encode_elsewhere=encode_in(process))
    try:
        with pytest.raises(InvalidRequest, match=f"allowed: .* {named}"):
            there.encode(6 * LARGE)
    finally:
        process.close()


def test_without_its_process_a_large_text_is_refused_until_later() -> None:
    process = LimitedProcess("budgeting.vocabulary:no_such_work", limits=encode_limits(1 << 20))
    there = ChatTokenizer(DEMO, encode_elsewhere=encode_in(process))
    try:
        with pytest.raises(BackendUnavailable, match="could not be tokenized"):
            there.encode(LARGE)
        assert there.encode(SMALL)
    finally:
        process.close()


def test_a_gateways_tokenizers_encode_large_texts_within_the_bounds_of_a_body() -> None:
    tokenizers = Tokenizers({DEMO}, max_body_bytes=1024, cache_bytes=1 << 20)
    try:
        with pytest.raises(InvalidRequest, match="MiB of tokens"):
            tokenizers.of(DEMO).encode(LARGE)
    finally:
        for process in tokenizers.processes:
            process.close()
