"""Images are fetched from untrusted servers; none of them can lead to a private network."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from budgeting.values import CanonicalPrompt
from gateway.config.images import ImagesSection
from gateway.contracts.images import ImageData
from gateway.errors import InvalidRequest, RateLimited
from gateway.images.address import BadAddress
from gateway.images.fetch import MAX_REDIRECTS, MAX_RUNNING, ImageFetcher, LookUp, NameLookup
from gateway.images.reading import ImageReader
from gateway.requests.body_memory import BodyMemory
from tests.images.samples import data_url, png, sample
from tests.images.test_reading import request_of
from tests.workers.authority import Authority
from tests.workers.raw_worker import until

PNG = sample("png")
# The test server's address: private, and the only one that the tests' configuration allows.
OPEN = "127.0.0.9"
PATIENCE_S = 60.0
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """A server with pages that the test sets; it counts connections and records request heads."""

    pages: dict[str, Answer] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    ended: int = 0
    port: int = 0

    def url(self, path: str = "/a.png", host: str = "images.example", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            await self.pages[head.split()[1]](writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def site(address: str = OPEN, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, address, 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def gives(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers])
        writer.write(lines.encode() + b"\r\n\r\n" + body)

    return answer


def leads(location: str, status: str = "302 Found") -> Answer:
    return gives(b"", f"location: {location}", status=status)


@dataclass
class Names:
    """A fake resolver: each look-up of a name returns the next of its address lists."""

    known: Mapping[str, Sequence[Sequence[str]]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        lists = self.known.get(host, [[host]])
        return lists[min(self.asked.count(host), len(lists)) - 1]


def fetcher(
    names: LookUp | None = None, tls: ssl.SSLContext | None = None, **changes: object
) -> ImageFetcher:
    bounds = {"fetch_networks": [OPEN], "fetch_timeout_seconds": PATIENCE_S, "max_bytes": 100_000, **changes}
    found = names or Names({"images.example": [[OPEN]]})
    return ImageFetcher(
        ImagesSection.model_validate(bounds), look_up=found, tls=tls or ssl.create_default_context()
    )


def free(size: int) -> None:
    """Accept any size: memory is unlimited."""


async def refusal(of: ImageFetcher, url: str) -> BadAddress:
    with pytest.raises(BadAddress) as refused:
        await of.fetch(url, "acme", free)
    return refused.value


async def test_an_image_is_fetched_without_cookies_credentials_or_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with site() as public:
        public.pages["/a.png?sig=1"] = gives(PNG)
        assert await fetcher().fetch(public.url("/a.png?sig=1#x"), "acme", free) == PNG
    [head] = public.heads
    names = [line.split(":")[0] for line in head.strip().split("\r\n")[1:]]
    assert names == ["host", "user-agent", "accept", "accept-encoding", "connection"]
    assert f"host: images.example:{public.port}\r\n" in head


async def test_a_body_in_chunks_and_one_that_ends_with_the_connection_are_whole() -> None:
    async def chunks(writer: asyncio.StreamWriter) -> None:
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in PNG) + b"0\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body)

    async def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + PNG)

    async with site() as public:
        public.pages |= {"/chunks": chunks, "/closed": until_closed}
        for path in public.pages:
            assert await fetcher().fetch(public.url(path), "acme", free) == PNG


@pytest.mark.parametrize("way", ["direct", "name", "redirect", "redirect to a name", "second redirect"])
async def test_nothing_connects_to_a_private_address(way: str) -> None:
    async with site() as public, site("127.0.0.1") as inner:
        inner.pages["/a.png"] = gives(PNG)
        direct, named = inner.url(host="127.0.0.1"), inner.url(host="inner.example")
        public.pages |= {
            "/redirect": leads(direct),
            "/redirect to a name".replace(" ", "-"): leads(named, "308 Permanent Redirect"),
            "/second-redirect": leads("/redirect", "301 Moved"),
        }
        urls = {"direct": direct, "name": named}
        names = Names({"images.example": [[OPEN]], "inner.example": [["127.0.0.1"]]})
        error = await refusal(fetcher(names), urls.get(way) or public.url("/" + way.replace(" ", "-")))
        assert str(error) == "is at a host that is not known or not public"
        assert inner.connections == 0


async def test_a_name_that_changes_its_address_between_check_and_use_leads_nowhere_else() -> None:
    async with site() as public, site("127.0.0.1") as inner:
        inner.pages["/a.png"] = gives(b"secrets")
        public.pages["/a.png"] = gives(PNG)
        public.pages["/again"] = leads("/a.png")
        rebinding = Names({"images.example": [[OPEN], ["127.0.0.1"]]})
        assert await fetcher(rebinding).fetch(public.url(), "acme", free) == PNG
        assert rebinding.asked == ["images.example"], "looked up once"
        rebinding = Names({"images.example": [[OPEN], ["127.0.0.1"]]})
        await refusal(fetcher(rebinding), public.url("/again"))
        both = Names({"images.example": [[OPEN, "127.0.0.1"]]})
        await refusal(fetcher(both), public.url())
        assert (inner.connections, public.connections) == (0, 2)


async def test_the_systems_lookup_reads_every_spelling_of_an_address() -> None:
    look_up = NameLookup()
    for spelling in ("127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1"):
        assert await look_up(spelling, 80) == ("127.0.0.1",)
        error = await refusal(fetcher(look_up), f"http://{spelling}/")
        assert "not public" in str(error)
    assert await look_up("a" * 64 + ".invalid", 80) == ()


async def test_redirects_are_followed_up_to_a_bound() -> None:
    async with site() as public:
        public.pages["/0"] = gives(PNG)
        public.pages |= {f"/{number}": leads(f"/{number - 1}", "307 X") for number in range(1, 9)}
        assert await fetcher().fetch(public.url(f"/{MAX_REDIRECTS}"), "acme", free) == PNG
        error = await refusal(fetcher(), public.url(f"/{MAX_REDIRECTS + 1}"))
        assert f"more than {MAX_REDIRECTS}" in str(error)
        public.pages["/loop"] = leads("/loop")
        await refusal(fetcher(), public.url("/loop"))
        assert public.connections == 3 * (MAX_REDIRECTS + 1)


async def drips(writer: asyncio.StreamWriter) -> None:
    """Send one byte of the body every 10 ms."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def is_silent(writer: asyncio.StreamWriter) -> None:
    """Accept the request and send nothing until the connection ends."""
    await writer.wait_closed()


@pytest.mark.parametrize("slow", [drips, is_silent])
async def test_a_slow_server_is_given_up(slow: Answer) -> None:
    async with site() as public:
        public.pages["/a.png"] = slow
        error = await refusal(fetcher(fetch_timeout_seconds=0.2), public.url())
        assert "did not come within 0.2 s" in str(error)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_huge_body_is_not_read_to_its_end(declared: bool) -> None:
    sent = 0

    async def huge(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\n" + (b"content-length: 1099511627776\r\n" if declared else b"") + b"\r\n"
        )
        while not writer.is_closing():
            writer.write(bytes(65_536))
            await writer.drain()
            sent += 65_536

    held = 0

    def hold(size: int) -> None:
        nonlocal held
        held += size

    async with site() as public:
        public.pages["/a.png"] = huge
        with pytest.raises(BadAddress, match="is too large"):
            await fetcher().fetch(public.url(), "acme", hold)
        await until(lambda: public.ended == 1)
    assert held <= 100_000 and sent < 64 << 20


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (gives(b"no", status="404 Not Found"), "the server answered 404"),
        (gives(PNG, status="206 Partial Content"), "the server answered 206"),
        (gives(b"", status="302 Found"), "the server answered 302"),
        (gives(b"", status="500 X"), "the server answered 500"),
        (leads("file:///etc/passwd"), "not an address of http"),
        (leads("http://user:secret@images.example/"), "user name or password"),
    ],
)
async def test_an_answer_that_is_no_image_is_told(answer: Answer, said: str) -> None:
    async with site() as public:
        public.pages["/a.png"] = answer
        error = await refusal(fetcher(), public.url())
        assert said in str(error) and "secret" not in str(error)


async def test_a_server_that_breaks_the_protocol_or_is_away_gives_no_answer() -> None:
    async def garbage(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 100)

    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nx")

    async def head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000)

    async with site() as public:
        public.pages |= {"/garbage": garbage, "/cut": cut, "/head": head}
        for path in public.pages:
            assert "no answer" in str(await refusal(fetcher(), public.url(path)))
        url = public.url()
    assert "no answer" in str(await refusal(fetcher(), url))


async def test_a_certificate_is_for_the_name_and_not_for_the_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusted = ssl.create_default_context(cafile=authority.ca_file)
    names = Names({"images.example": [[OPEN]], "other.example": [[OPEN]]})
    of = fetcher(names, trusted)
    async with site(tls=authority.server("images.example")) as public:
        public.pages["/a.png"] = gives(PNG)
        assert await of.fetch(public.url(scheme="https"), "acme", free) == PNG
        assert "no answer" in str(await refusal(of, public.url(host="other.example", scheme="https")))
        assert "no answer" in str(await refusal(of, public.url(host=OPEN, scheme="https")))
        assert "no answer" in str(await refusal(fetcher(), public.url(scheme="https"))), "not trusted"


async def test_a_tenant_has_a_share_of_the_fetches_and_others_go_on() -> None:
    forever = asyncio.Event()

    async def look_up(host: str, port: int) -> Sequence[str]:
        if host == "slow.example":
            await forever.wait()
        return ()

    of = fetcher(look_up)
    async with asyncio.TaskGroup() as group:
        slow = [group.create_task(of.fetch("http://slow.example/", "acme", free)) for _ in range(MAX_RUNNING)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):
            await of.fetch("http://slow.example/", "acme", free)
        with pytest.raises(BadAddress):
            await of.fetch("http://quick.example/", "globex", free)
        for task in slow:
            task.cancel()
    with pytest.raises(BadAddress):
        await of.fetch("http://quick.example/", "acme", free)


async def test_a_cancelled_fetch_closes_the_connection_and_frees_the_memory() -> None:
    memory = BodyMemory(1_000_000)

    async def fetch(url: str) -> None:
        with memory.holding("acme") as hold:
            await fetcher().fetch(url, "acme", hold)

    async with site() as public, asyncio.TaskGroup() as group:
        public.pages["/a.png"] = drips
        task = group.create_task(fetch(public.url()))
        await until(lambda: memory.held_bytes > 0)
        task.cancel()
        await until(lambda: public.ended == 1)
    assert memory.held_bytes == 0


async def read(of: ImageFetcher, *urls: str, memory: int = 1 << 20) -> Mapping[str, ImageData]:
    request, bodies = request_of(*urls), BodyMemory(memory)
    reader = ImageReader(ImagesSection(max_pixels=1_000_000), bodies.holding, of)
    try:
        with reader.of(request) as images:
            await images.read(CanonicalPrompt(turns=request.messages), asyncio.to_thread)
            return images.data
    finally:
        assert bodies.held_bytes == 0


async def test_fetched_images_and_inline_images_give_the_same_data() -> None:
    async with site() as public:
        public.pages |= {"/a.png": gives(PNG, "content-type: text/html"), "/b": gives(sample("jpeg"))}
        found = await read(fetcher(), public.url(), data_url(PNG), public.url("/b"))
    seen = [(one.media_type, one.decoded(), b"".join(one.base64())) for one in found.values()]
    assert seen == [(f"image/{name}", sample(name), b64encode(sample(name))) for name in ("png", "jpeg")]


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (b"<html>login</html>", ["content-type: image/png"], "is no PNG, JPEG, GIF or WebP"),
        (gzip.compress(PNG, mtime=0), ["content-encoding: gzip", "content-type: image/png"], "is no PNG"),
        (png(50_000, 50_000), ["content-type: image/png"], "has 2500000000 pixels"),
        (b"", [], "is no PNG"),
    ],
)
async def test_the_content_gives_the_type_not_the_header(body: bytes, headers: list[str], said: str) -> None:
    async with site() as public:
        public.pages["/a.png"] = gives(body, *headers)
        with pytest.raises(InvalidRequest) as refused:
            await read(fetcher(), data_url(PNG), public.url())
    assert said in refused.value.message and public.url() not in refused.value.message
    assert refused.value.param == "messages.0.content.1.image_url.url"


async def test_images_are_fetched_within_the_memory_of_bodies() -> None:
    async with site() as public:
        public.pages["/a.png"] = gives(PNG + bytes(60_000))
        with pytest.raises(RateLimited):
            await read(fetcher(), public.url(), public.url(), memory=200_000)
        assert await read(fetcher(), public.url(), public.url(), memory=400_000)
