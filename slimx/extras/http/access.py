"""Bearer tokens for HTTP servers that listen on non-loopback addresses. Imports only the standard library, because
programs in the Python environments of other projects import it."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os


def token_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str | None:
    """Returns the token in the environment variable that the option --token-env names; None without the option. Exits
    with a usage error if the variable is empty, or if --host is not a loopback address and the option is missing."""
    if arguments.token_env is None:
        if not is_loopback(arguments.host):
            parser.error(
                f"--host {arguments.host} can be reached from other machines; add --token-env NAME to require a token"
            )
        return None
    token = os.environ.get(arguments.token_env)
    if not token:
        parser.error(f"--token-env: the environment variable {arguments.token_env} is not set; export it")
    return token


def permitted(authorization: str, token: str | None) -> bool:
    """Returns True if `authorization`, the value of an Authorization header, contains `token`, or if `token` is None
    because the server requires none."""
    expected = f"Bearer {token}".encode()
    return token is None or hmac.compare_digest(authorization.encode(errors="surrogateescape"), expected)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
