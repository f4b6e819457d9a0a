"""An image's type and size are read from its first bytes, whatever the content."""

from __future__ import annotations

import time
from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.images.header import ImageHeader, UnreadableImage, read_header
from tests.images.samples import ANIMATED, SAMPLES, png, sample


@pytest.mark.parametrize("name", SAMPLES)
def test_type_and_size_are_read_from_the_bytes(name: str) -> None:
    assert read_header(sample(name)) == ImageHeader(f"image/{name.split('_')[0]}", 5, 3)


@pytest.mark.parametrize("name", ANIMATED)
def test_an_image_of_several_pictures_is_refused(name: str) -> None:
    with pytest.raises(UnreadableImage, match="animated"):
        read_header(b64decode(ANIMATED[name]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
        (b"<html><body>Not found", "is no PNG"),
        (b"BM" + bytes(60), "is no PNG"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "without a header"),
        (png(0, 7), "no pixels"),
        (b"\xff\xd8\xff\xda" + bytes(60), "without a header"),
        (b"\xff\xd8\xff\xe0\x00\x02" + bytes(60), "broken JPEG"),
        (b"GIF89a\x05\x00\x03\x00\x00\x00\x00;", "no pixels"),
        (b"GIF89a\x05\x00\x03\x00\x00\x00\x00?", "broken GIF"),
        (b"RIFF\x00\x00\x00\x00WEBPXXXX" + bytes(40), "broken WebP"),
    ],
)
def test_what_is_no_image_is_named(data: bytes, said: str) -> None:
    with pytest.raises(UnreadableImage, match=said):
        read_header(data)


def test_a_gifs_picture_that_is_larger_than_its_screen_counts_with_its_own_size() -> None:
    picture = b"\x2c\x00\x00\x00\x00\x00\x80\x00\x80\x00\x02\x00;"
    data = b"GIF89a\x01\x00\x01\x00\x00\x00\x00" + picture
    assert read_header(data) == ImageHeader("image/gif", 0x8000, 0x8000)


@pytest.mark.parametrize("start", [b"\xff\xd8\xff", b"GIF89a\x05\x00\x03\x00\x00\x00\x00\x21\xfe"])
def test_a_file_of_millions_of_tiny_blocks_is_given_up(start: bytes) -> None:
    before = time.process_time()
    with pytest.raises(UnreadableImage, match="too many blocks"):
        read_header(start + (b"\xff" if start[0] == 0xFF else b"\x01") * 8_000_000)
    assert time.process_time() - before < 10


@given(st.sampled_from([*map(sample, SAMPLES), *map(b64decode, ANIMATED.values())]), st.data())
def test_a_changed_file_is_an_image_or_refused_by_a_sentence(whole: bytes, draw: st.DataObject) -> None:
    data = bytearray(whole[: draw.draw(st.integers(0, len(whole)))])
    for at in draw.draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=8)) if data else ():
        data[at] = draw.draw(st.integers(0, 255))
    try:
        header = read_header(bytes(data))
    except UnreadableImage as error:
        assert str(error)
    else:
        assert header.width > 0 and header.height > 0
