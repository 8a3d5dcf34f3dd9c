"""Requests from threads end by their deadlines, and take proxies but no credentials from the environment."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from slimx.extras.http import blocking
from slimx.extras.http.blocking import fetch
from tests.webhook_server import Received, webhook_server

LARGE = 2**26
"""Bytes that no socket buffers."""


@pytest.fixture
def server() -> Iterator[Received]:
    with webhook_server() as received:
        yield received


@pytest.mark.parametrize("data", [bytes(LARGE), io.BytesIO(bytes(LARGE))], ids=["bytes", "file"])
def test_a_peer_that_never_reads_ends_the_upload_at_the_deadline(data):
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(TimeoutError):
        fetch("PUT", f"http://127.0.0.1:{deaf.getsockname()[1]}/", data=data, connect_s=0.2, read_s=0.2)


def test_a_token_is_sent_although_netrc_has_credentials(server, monkeypatch, tmp_path: Path):
    (tmp_path / "netrc").write_text("default login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    headers = {"Authorization": "Bearer token"}
    assert fetch("POST", server.url, json={}, headers=headers, connect_s=60, read_s=60).status == 200


def test_headers_of_a_response_have_no_case(server):
    server.statuses, server.headers = [503], {"retry-after": "7"}
    headers = fetch("POST", server.url, json={}, connect_s=60, read_s=60).headers
    assert headers["Retry-After"] == headers["retry-after"] == "7" and "RETRY-AFTER" in headers


def test_a_header_that_cannot_be_sent_is_an_error_of_the_request(server):
    with pytest.raises(aiohttp.ClientError):
        fetch("POST", server.url, json={}, headers={"Authorization": "Bearer a\nb"}, connect_s=60, read_s=60)


@pytest.mark.parametrize(
    ("no_proxy", "proxy"),
    [
        ("", "http://proxy:3128"),
        ("10.2.3.4", None),
        ("10.0.0.0/8", None),
        ("example.com, 10.2.0.0/16", None),
        ("192.168.0.0/16,no/8", "http://proxy:3128"),
    ],
)
def test_hosts_and_networks_of_no_proxy_get_no_proxy(monkeypatch, no_proxy, proxy):
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert blocking._proxy_of("http://10.2.3.4:80/v1") == proxy
    assert blocking._proxy_of("https://10.2.3.4/v1") is None


@pytest.mark.parametrize("set_for_http", [True, False])
def test_the_proxy_of_all_schemes_is_used_where_none_is_set_for_one(monkeypatch, set_for_http):
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "http://any:3128")
    if set_for_http:
        monkeypatch.setenv("http_proxy", "http://one:3128")
    assert blocking._proxy_of("http://10.2.3.4/v1") == ("http://one:3128" if set_for_http else "http://any:3128")
    assert blocking._proxy_of("https://10.2.3.4/v1") == "http://any:3128"
    monkeypatch.setenv("ALL_PROXY", "socks5://any:1080")
    assert blocking._proxy_of("https://10.2.3.4/v1") is None
