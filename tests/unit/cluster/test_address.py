"""The address of a Ray cluster is tried before Ray tries it, for minutes."""

from __future__ import annotations

import socket

import pytest

from slimx.cluster.access import check_reachable
from tests.refusals import refused


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_at_which_nothing_listens_is_refused(form: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = form.format(listener.getsockname()[1])
        with refused("cluster.unreachable", about="cluster.ray_address"):
            check_reachable(address)
        listener.listen()
        check_reachable(address)


@pytest.mark.parametrize("address", ["127.0.0.1:port", "127.0.0.1:99999"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with refused("cluster.unreachable"):
        check_reachable(address)


@pytest.mark.parametrize("address", [None, "auto"])
def test_an_address_that_ray_resolves_is_accepted(address: str | None) -> None:
    check_reachable(address)
