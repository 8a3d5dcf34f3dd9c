"""API keys of a run's servers: random for each run, and never on a command line or in an environment variable.

A server process receives them on its standard input, a pipe that no other process can read. SGLang has two keys:
`api_key` for generation, `admin_api_key` for everything that changes the server (weights, pauses, aborts, profiles)."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slimx.errors import SlimxError

STDIN = "-"
"""Value of the option --keys that makes a process read its keys from standard input."""


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys that one server requires; None for a key that it does not require."""

    api_key: str | None = None
    admin_api_key: str | None = None

    @staticmethod
    def random() -> Keys:
        """Returns two random 256-bit keys."""
        return Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    @property
    def control(self) -> str | None:
        """Key for control calls: `admin_api_key`, or `api_key`, which SGLang accepts for them if a server has no
        `admin_api_key`."""
        return self.admin_api_key or self.api_key

    def __repr__(self) -> str:
        """Returns the names of the keys that are set, without values, because objects that contain keys are printed and
        logged."""
        return f"Keys({', '.join(name for name, key in asdict(self).items() if key is not None)})"

    def to_bytes(self) -> bytes:
        """Returns the keys as JSON, to be written to a server's standard input."""
        return json.dumps(asdict(self)).encode()

    def flags(self) -> list[str]:
        """Returns the keys as SGLang's command-line flags, to be parsed within the server's process.

        Flag and value are joined by "=", because a key may start with a dash."""
        keys = {"--api-key": self.api_key, "--admin-api-key": self.admin_api_key}
        return [f"{flag}={key}" for flag, key in keys.items() if key is not None]

    @staticmethod
    def read(where: str) -> Keys:
        """Returns the keys in the JSON file `where`, or on standard input if it is "-": {"api_key": ...,
        "admin_api_key": ...}.

        Raises SlimxError if other users may read the file, or if its content is not such an object."""
        if where == STDIN:
            text = sys.stdin.read()
        else:
            try:
                if stat.S_IMODE(os.stat(where).st_mode) & 0o077:
                    raise SlimxError(
                        f"--keys: {where} can be read by other users; run `chmod 600 {where}`",
                        code="keys.mode",
                        about=where,
                    )
                text = Path(where).read_text()
            except OSError as error:
                raise SlimxError(
                    f"--keys: {where} cannot be read ({error.strerror}); pass the path of a readable file",
                    code="keys.file",
                    about=where,
                ) from None
        try:
            return Keys(**json.loads(text))
        except (ValueError, TypeError):
            # The cause is omitted, because its message would show the content that was read.
            raise SlimxError(
                f'--keys: {where} has no valid keys; put {{"api_key": "...", "admin_api_key": "..."}} into the file',
                code="keys.form",
                about=where,
            ) from None


NO_KEYS = Keys()
"""Keys of a server that requires none."""


def key_in(name: str | None, variables: Mapping[str, str], where: str) -> str | None:
    """Returns the key in the environment variable `name`, or None if `name` is None.

    `variables`: the environment. `where`: configuration group that names the variable, for messages. Raises SlimxError
    if the variable is not set."""
    if name is None:
        return None
    key = variables.get(name)
    if not key:
        raise SlimxError(
            f"{where} names the environment variable {name}, which is not set; export that variable for the run",
            code="keys.variable",
            about=name,
        )
    return key


def bearer(key: str | None) -> dict[str, str]:
    """Returns the HTTP headers that authenticate a request with `key`; no headers if `key` is None."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
