"""Configuration of sandboxes: their backend, limits and further options."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slimx.data.integers import as_whole
from slimx.errors import SlimxError
from slimx.extras.boxes import rootfs
from slimx.extras.boxes.bubblewrap import BubblewrapBox
from slimx.extras.boxes.containers import ContainerBox
from slimx.extras.boxes.conversion import refused_field
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxRefusal
from slimx.extras.boxes.remote import RemoteBox, RemoteServer

LIMITS = tuple(limit.name for limit in dataclasses.fields(Limits))
Above0 = Annotated[float, Meta(gt=0)]
ONLY = {
    "engine": ("container",),
    "user": ("container",),
    "cpus": ("container",),
    "host_usr": ("bubblewrap", "container"),
    "base": ("bubblewrap", "container"),
    "url": ("remote",),
    "token_env": ("remote",),
    "patience": ("remote",),
    "retry": ("remote",),
}
"""For each option that only some backends have, the names of these backends."""
NOT_IN_HEADERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Pattern of a character that the value of an HTTP header may not contain: a control character other than tab."""


class BoxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sandbox options of a run."""

    backend: Literal["bubblewrap", "container", "remote"] = "bubblewrap"
    limits: Limits = Limits()
    """Resource limits for each program. A configuration lists them directly among the other options."""
    host_usr: bool = False
    """True to mount this machine's /usr read-only, for roots without programs."""
    engine: tuple[str, ...] = ()
    """Command that starts the container engine, as a list of arguments; () for the first of podman and docker that
    works."""
    user: str | None = None
    cpus: Above0 = 1.0
    base: Path | None = None
    """Parent directory of the sandboxes' root directories; None for the temporary directory."""
    image_mib: Annotated[int, Meta(gt=0)] = 4096
    url: str = ""
    token_env: str | None = None
    """Environment variable that contains the server's token; None if the server requires none."""
    patience: Above0 = 30.0
    """Seconds to wait for a sandbox while the server has none free."""
    retry: Above0 = 30.0
    """Seconds for which a call is retried while the server does not respond."""

    @classmethod
    def read(cls, options: Mapping[str, object], key: str) -> BoxOptions:
        """Parses options as they are written in a configuration, with the limits directly among the other options.

        `key`: configuration key of the options. Raises SlimxError naming the invalid option.
        """
        fields: dict[str, object] = {name: as_whole(value) for name, value in options.items()}
        if "limits" in fields:
            raise _refusal(
                f"the option limits is unknown; set {', '.join(LIMITS)} next to the other options", f"{key}.limits"
            )
        if isinstance(fields.get("engine"), str):
            fields["engine"] = [fields["engine"]]
        fields["limits"] = {name: fields.pop(name) for name in LIMITS if name in fields}
        try:
            read = msgspec.convert(fields, cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            field, reason = refused_field(error)
            raise _refusal(reason, f"{key}.{field.removeprefix('limits.')}") from error
        for name, backends in ONLY.items():
            if name in fields and read.backend not in backends:
                raise _refusal(f"the backend {read.backend} has no option {name}; remove {key}.{name}", f"{key}.{name}")
        if read.backend == "remote" and not read.url.startswith(("http://", "https://")):
            raise _refusal(
                f"{read.url!r} is not an http or https URL; set it to a sandbox server's URL, such as http://HOST:8600",
                f"{key}.url",
            )
        if read.token_env is not None:
            _check_token(read.token_env, f"{key}.token_env")
        return read

    def make(self, source: str | Path, *, seconds: float | None = None) -> Box:
        """Creates a sandbox.

        `source`: name of an image, or a path on this machine. `seconds`: time limit of one program, instead of
        `limits.seconds`. Raises BoxRefusal for an unusable source, BoxLost if the engine or server fails, BoxBusy if
        the server has no free sandbox.
        """
        limits = self.limits if seconds is None else dataclasses.replace(self.limits, seconds=seconds)
        if self.backend == "remote":
            return RemoteBox(source, limits, server=self.server(), patience=self.patience, image_mib=self.image_mib)
        if self.backend == "container":
            return ContainerBox(
                source,
                limits,
                engine=ContainerEngine.find(self.engine),
                user=self.user,
                cpus=self.cpus,
                host_usr=self.host_usr,
                base=self.base,
                image_mib=self.image_mib,
            )
        if isinstance(source, str):
            raise BoxRefusal(
                f"backend=bubblewrap needs a tar archive or a directory, but {source} is the name of an image; give an "
                "archive or a directory, or set backend=container",
                code="source",
                about=source,
            )
        return BubblewrapBox(source, limits, host_usr=self.host_usr, base=self.base, image_mib=self.image_mib)

    def check_source(self, source: str | Path) -> None:
        """Raises BoxRefusal if an image or a root does not exist, without creating a sandbox."""
        if isinstance(source, Path):
            if not source.exists():
                raise rootfs.no_source(source)
        elif self.backend == "container":
            engine = ContainerEngine.find(self.engine)
            if not engine.has_image(source):
                raise engine.no_image(source)
        elif self.backend == "remote":
            self.server().check_image(source)
        else:
            self.make(source)

    def server(self) -> RemoteServer:
        token = os.environ[self.token_env] if self.token_env else None
        return RemoteServer(self.url.rstrip("/"), token, self.retry)

    def sweep(self) -> int:
        """Removes roots, containers and images that killed runs left on this machine, and returns how many it
        removed."""
        if self.backend == "remote":
            return 0
        removed = rootfs.sweep(self.base)  # the container backend makes roots too, from which it imports images
        if self.backend == "container":
            removed += ContainerEngine.find(self.engine).sweep()
        return removed


@contextlib.contextmanager
def merged(root: Path | None, files: Path | None, directory: str, most: int) -> Iterator[Path]:
    """Yields a temporary root directory: a copy of `root` in which `directory` contains a copy of `files`.

    `root`: archive or directory; None for an empty root. `most`: maximum size of an unpacked archive, in bytes. Raises
    BoxRefusal for an unusable root.
    """
    with tempfile.TemporaryDirectory(prefix="slimx-merged-") as temporary:
        merged_root = Path(temporary) / "root"
        if root is not None and root.is_dir():
            rootfs.copy(root, merged_root)
        else:
            merged_root.mkdir()
            if root is not None:
                rootfs.unpack(root, merged_root, most)
        target = merged_root.joinpath(*directory.strip("/").split("/"))
        if not target.parent.resolve().is_relative_to(merged_root.resolve()) or target.is_symlink():
            raise BoxRefusal(
                f"the directory {directory} of the root {root} "
                f"{'is a link' if target.is_symlink() else 'leads out of the root through a link'}; use a directory "
                "whose path contains no links",
                code="member",
                about=directory,
            )
        target.mkdir(parents=True, exist_ok=True)
        if files is not None:
            rootfs.copy(files, target)
        yield merged_root


def _check_token(variable: str, key: str) -> None:
    """Raises SlimxError if an environment variable is empty, or if its value is not allowed in an HTTP header.

    `key`: configuration key that names the variable.
    """
    token = os.environ.get(variable)
    if not token:
        raise _refusal(
            f"the environment variable {variable} is empty or not set; export the token before starting the run", key
        )
    control = NOT_IN_HEADERS.search(token)
    if control is not None:
        raise _refusal(
            f"the environment variable {variable} contains the control character {control[0]!r}, which no HTTP header "
            "may contain; export the token without this character",
            key,
        )


def _refusal(reason: str, key: str) -> SlimxError:
    return SlimxError(f"{key}: {reason}", code="box.option", about=key)
