"""Tokens of servers that others can reach. Imports Python's own library alone: servers beside other projects use it."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os


def token_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str | None:
    """The token in the variable `arguments.token_env`; None without one, which only loopback as `arguments.host` may
    have. Ends the program otherwise."""
    if arguments.token_env is None:
        if not is_loopback(arguments.host):
            parser.error(f"--host {arguments.host} is open to others: give --token-env")
        return None
    token = os.environ.get(arguments.token_env)
    if not token:
        parser.error(f"--token-env: {arguments.token_env} is not set")
    return token


def permitted(given: str, token: str | None) -> bool:
    """True for a request whose header Authorization bears the token, if there is one."""
    wanted = f"Bearer {token}".encode()
    return token is None or hmac.compare_digest(given.encode(errors="surrogateescape"), wanted)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
