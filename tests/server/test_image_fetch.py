"""Nothing that a client writes makes the server talk to where it must not."""

from __future__ import annotations

import asyncio
import base64
import io
import ssl
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from prism.config.sections.server import ImageConfig
from prism.config.units import Bytes, Seconds
from prism.server.errors import ApiError
from prism.server.image_fetch import ImageFetcher, is_public
from prism.server.images import check_image, decode_data_url

HOSTS = ("images.example.org", "*.cdn.example.org", "odd.example.org:8443")
PUBLIC = "93.184.215.14"


def png(width: int = 4, height: int = 4) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(out, "PNG")
    return out.getvalue()


class Net:
    """A resolver and the requests that reached the network."""

    def __init__(self, *addresses: str, answer: httpx.Response | None = None) -> None:
        self.addresses, self.asked, self.got = addresses, [], []
        self.answer = answer or httpx.Response(200, content=png())

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.addresses

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.got.append(request)
        return self.answer

    def fetch(self, url: str, **limits: Any) -> bytes:
        found = ImageConfig(**{"hosts": HOSTS, **limits})
        fetcher = ImageFetcher(found, self.resolve, httpx.MockTransport(self.handle))
        return asyncio.run(fetcher.fetch(url, "messages.0.content.1.image_url.url"))


def test_the_connection_goes_to_the_address_that_was_looked_at() -> None:
    net = Net(PUBLIC)
    assert net.fetch("https://images.example.org/a/b.png?x=1") == png()
    [request] = net.got
    assert str(request.url) == f"https://{PUBLIC}/a/b.png?x=1"
    assert request.headers["host"] == "images.example.org"
    assert request.extensions["sni_hostname"] == "images.example.org"
    assert net.asked == [("images.example.org", 443)], "a second look could find another address"


def test_certificates_are_read_once_and_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    net, used, readers = Net(PUBLIC), [], []
    client, read = httpx.AsyncClient, httpx.create_ssl_context

    def opened(**options: Any) -> httpx.AsyncClient:
        used.append(options["verify"])
        return client(**{**options, "transport": httpx.MockTransport(net.handle)})

    def reads(**options: Any) -> Any:
        readers.append(threading.get_ident())
        return read(**options)

    monkeypatch.setattr(httpx, "AsyncClient", opened)
    monkeypatch.setattr(httpx, "create_ssl_context", reads)
    fetcher = ImageFetcher(ImageConfig(hosts=HOSTS), net.resolve)

    async def fetched() -> list[bytes]:
        return [await fetcher.fetch(f"{scheme}://images.example.org/x", "w") for scheme in ("https", "https", "http")]

    assert asyncio.run(fetched()) == [png()] * 3
    assert len(readers) == 1 and readers != [threading.get_ident()]
    first, second, plain = used
    assert isinstance(first, ssl.SSLContext) and first is second and plain is False
    assert first.check_hostname and first.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    "url",
    [
        "https://a.cdn.example.org/x",
        "http://images.example.org",
        "https://odd.example.org:8443/",
        "https://IMAGES.example.org.",
    ],
)
def test_listed_hosts(url: str) -> None:
    assert Net(PUBLIC).fetch(url) == png()


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/x.png",
        "https://images.example.org.evil.net/x.png",
        "https://images.example.org:8080/x.png",
        "https://odd.example.org/x.png",
        "https://user@images.example.org/x.png",
        "https://images.example.org\\@127.0.0.1/x.png",
        "https://127.0.0.1/x.png",
        "https://[::1]/x.png",
        "file:///etc/passwd",
        "/etc/passwd.png",
        "gopher://images.example.org/x",
        "ftp://images.example.org/x",
        "https://images.example.org:99999/x",
        "https://",
        "",
    ],
)
def test_everything_else_is_refused_before_anybody_is_asked(url: str) -> None:
    net = Net(PUBLIC)
    with pytest.raises(ApiError) as refused:
        net.fetch(url)
    assert (refused.value.status, refused.value.param) == (400, "messages.0.content.1.image_url.url")
    assert not net.asked and not net.got


def test_without_listed_hosts_nothing_is_fetched() -> None:
    net = Net(PUBLIC)
    with pytest.raises(ApiError, match="data:image/png"):
        net.fetch("https://images.example.org/x.png", hosts=())
    assert not net.asked


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "nonsense",
    ],
)  # fmt: skip
def test_private_addresses_are_never_reached(address: str) -> None:
    assert not is_public(address)
    for addresses in ((address,), (PUBLIC, address)):
        net = Net(*addresses)
        with pytest.raises(ApiError, match="not public"):
            net.fetch("https://images.example.org/x.png")
        assert not net.got


def test_public_addresses() -> None:
    assert is_public(PUBLIC) and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c") and is_public("64:ff9b::808:808")


def test_redirects_are_not_followed() -> None:
    net = Net(PUBLIC, answer=httpx.Response(302, headers={"location": "http://169.254.169.254/latest/meta-data"}))
    with pytest.raises(ApiError, match="302; redirects are not followed"):
        net.fetch("https://images.example.org/x.png")
    assert len(net.got) == 1


def test_what_is_too_large_is_cut_off() -> None:
    net = Net(PUBLIC, answer=httpx.Response(200, content=bytes(2000)))
    with pytest.raises(ApiError, match="An image may have 1000"):
        net.fetch("https://images.example.org/x.png", max_bytes=Bytes(1000))


def test_what_unpacks_itself_is_refused() -> None:
    import gzip

    net = Net(PUBLIC, answer=httpx.Response(200, content=gzip.compress(bytes(9)), headers={"content-encoding": "gzip"}))
    with pytest.raises(ApiError, match="compressed"):
        net.fetch("https://images.example.org/x.png")


def test_what_never_comes_is_given_up() -> None:
    class Silent(Net):
        async def resolve(self, host: str, port: int) -> Sequence[str]:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(ApiError, match="in time"):
        Silent().fetch("https://images.example.org/x.png", timeout_s=Seconds(0.01))


LIMITS = ImageConfig(max_bytes=Bytes(4000), max_pixels=100)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:text/html;base64,AAAA", "data:image/png"),
        ("data:image/png,AAAA", "data:image/png"),
        ("data:image/png;base64", "data:image/png"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        (data_url(bytes(4001)), "4000B"),
        (data_url(bytes(9000)), "4000B"),
        (data_url(b"<svg></svg>"), "no image in a known format"),
        (data_url(png(20, 20)), "20 x 20"),
        (data_url(png(9, 9)[:-30]), "cannot be read"),
    ],
)
def test_data_urls_that_are_no_images(url: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_image(decode_data_url(url, LIMITS, "here"), LIMITS, "here")
    assert words in refused.value.message and refused.value.param == "here"


def test_an_image_is_taken_as_it_is() -> None:
    assert check_image(decode_data_url(data_url(png()), LIMITS, "here"), LIMITS, "here") == "PNG"
