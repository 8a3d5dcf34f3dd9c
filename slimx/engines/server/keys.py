"""The keys that a server of a run asks for: random for each run, and never on a command line or in an environment.

A process is given them on its standard input, a pipe that nobody else can read. They are SGLang's own two: `api_key`
for generation, `admin_api_key` for everything that changes the server (weights, pauses, aborts, profiles).
"""

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
"""Stands for standard input in place of a file's path."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that one server asks for; None: it does not ask."""

    api_key: str | None = None
    admin_api_key: str | None = None

    @staticmethod
    def random() -> Keys:
        """Keys that nobody can guess, 256 bits each."""
        return Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    @property
    def control(self) -> str | None:
        """The key of control calls: SGLang takes `api_key` for them where a server has no other."""
        return self.admin_api_key or self.api_key

    def __repr__(self) -> str:
        """Says which keys there are, and not what they are: records with keys are printed and logged."""
        return f"Keys({', '.join(name for name, key in asdict(self).items() if key is not None)})"

    def to_bytes(self) -> bytes:
        """JSON, for the standard input of a server."""
        return json.dumps(asdict(self)).encode()

    def flags(self) -> list[str]:
        """SGLang's arguments, for its parser within the server's process. In one piece: a key may begin with a dash."""
        given = {"--api-key": self.api_key, "--admin-api-key": self.admin_api_key}
        return [f"{flag}={key}" for flag, key in given.items() if key is not None]

    @staticmethod
    def read(where: str) -> Keys:
        """The keys in a file, or on standard input (`-`): JSON of `api_key` and `admin_api_key`.

        Raises SlimxError for a file that others may read, or that holds anything else."""
        if where == STDIN:
            text = sys.stdin.read()
        else:
            try:
                if stat.S_IMODE(os.stat(where).st_mode) & 0o077:
                    raise SlimxError(
                        f"--keys {where}: others may read it; chmod 600 {where}", code="keys.mode", about=where
                    )
                text = Path(where).read_text()
            except OSError as error:
                raise SlimxError(
                    f"--keys {where} cannot be read ({error.strerror}); name a file", code="keys.file", about=where
                ) from None
        try:
            return Keys(**json.loads(text))
        except (ValueError, TypeError):
            # Without the cause: its message would show what was read.
            raise SlimxError(
                f'--keys {where}: give {{"api_key": "...", "admin_api_key": "..."}}', code="keys.form", about=where
            ) from None


NO_KEYS = Keys()
"""Keys of a server that asks for none."""


def key_in(name: str | None, variables: Mapping[str, str], where: str) -> str | None:
    """The key that the environment variable `name` holds, None without a name. Raises SlimxError if it is not set."""
    if name is None:
        return None
    if not (key := variables.get(name)):
        raise SlimxError(
            f"{where} names the environment variable {name}, which is not set; export it where the run is started",
            code="keys.variable",
            about=name,
        )
    return key


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a request with `key`; none without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
