"""The boxes that a configuration describes: on which back end, within which limits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slimx.data.whole import as_whole
from slimx.errors import SlimxError
from slimx.extras.boxes import roots
from slimx.extras.boxes.bubblewrap import BubblewrapBox
from slimx.extras.boxes.containers import ContainerBox
from slimx.extras.boxes.conversion import place_of
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxRefusal
from slimx.extras.boxes.remote import RemoteBox, RemoteServer

LIMITS = tuple(each.name for each in dataclasses.fields(Limits))
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
    "again": ("remote",),
}
"""Options that only some back ends have."""


class BoxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the boxes of a run."""

    backend: Literal["bubblewrap", "container", "remote"] = "bubblewrap"
    limits: Limits = Limits()
    """Among the others in a configuration."""
    host_usr: bool = False
    """Boxes read this machine's /usr, for roots that bring no programs."""
    engine: tuple[str, ...] = ()
    """Words that start the container engine; () for the first of podman and docker that answers."""
    user: str | None = None
    cpus: Above0 = 1.0
    base: Path | None = None
    """Directory of the roots; None for the one for temporary files."""
    image_mib: Annotated[int, Meta(gt=0)] = 4096
    url: str = ""
    token_env: str | None = None
    """Variable that holds the server's token."""
    patience: Above0 = 30.0
    """Seconds to wait for a box while the server has none to give."""
    again: Above0 = 30.0
    """Seconds for which a call is made again that the server does not answer."""

    @classmethod
    def read(cls, options: Mapping[str, Any], key: str) -> BoxOptions:
        """Options as a configuration writes them, the limits among the others. Raises SlimxError naming `key` and the
        option."""
        given = {name: as_whole(value) for name, value in options.items()}
        if "limits" in given:
            raise _refusal(f"is unknown; write {', '.join(LIMITS)} themselves", f"{key}.limits")
        if isinstance(given.get("engine"), str):
            given["engine"] = [given["engine"]]
        given["limits"] = {name: given.pop(name) for name in LIMITS if name in given}
        try:
            read = msgspec.convert(given, cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            where, what = place_of(error)
            raise _refusal(what, f"{key}.{where.removeprefix('limits.')}") from error
        for name, backends in ONLY.items():
            if name in given and read.backend not in backends:
                raise _refusal(f"boxes of {read.backend} have no {name}; leave it out", f"{key}.{name}")
        if read.backend == "remote" and not read.url.startswith(("http://", "https://")):
            raise _refusal(f"{read.url!r} is no URL with http or https", f"{key}.url")
        if read.token_env is not None and not os.environ.get(read.token_env):
            what = f"{read.token_env} is not set, or empty; export it where the run is started"
            raise _refusal(what, f"{key}.token_env")
        return read

    def make(self, source: str | Path, *, seconds: float | None = None) -> Box:
        """A box that begins from an image's name or a path of this machine. `seconds`: for one program, instead of its
        limit. Raises BoxRefusal, BoxLost, BoxBusy."""
        limits = self.limits if seconds is None else dataclasses.replace(self.limits, seconds=seconds)
        if self.backend == "remote":
            return RemoteBox(source, limits, server=self.server(), patience=self.patience, image_mib=self.image_mib)
        shared: dict[str, Any] = {"host_usr": self.host_usr, "base": self.base, "image_mib": self.image_mib}
        if self.backend == "container":
            engine = ContainerEngine.find(self.engine)
            return ContainerBox(source, limits, engine=engine, user=self.user, cpus=self.cpus, **shared)
        if isinstance(source, str):
            raise BoxRefusal(
                f"boxes of bubblewrap begin from a tar archive or a directory, and {source} is an image; give a "
                "root, or take the back end container",
                code="source",
                about=source,
            )
        return BubblewrapBox(source, limits, **shared)

    def check_source(self, source: str | Path) -> None:
        """Refuse an image or a root that is not there (BoxRefusal), without beginning a box."""
        if isinstance(source, Path):
            if not source.exists():
                raise roots.no_source(source)
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
        return RemoteServer(self.url.rstrip("/"), token, self.again)

    def sweep(self) -> int:
        """Remove what boxes of killed runs have left on this machine; how much there was."""
        if self.backend == "remote":
            return 0
        left = roots.sweep(self.base)  # containers have roots, too, while images are made of them
        return left + (ContainerEngine.find(self.engine).sweep() if self.backend == "container" else 0)


@contextlib.contextmanager
def merged(root: Path | None, files: Path | None, directory: str, most: int) -> Iterator[Path]:
    """A directory that holds `root` (an archive, a directory, or nothing), and what is in `files` at `directory`.
    `most`: bytes of an archive. Raises BoxRefusal."""
    with tempfile.TemporaryDirectory(prefix="slimx-merged-") as made:
        whole = Path(made) / "root"
        if root is not None and root.is_dir():
            roots.copy(root, whole)
        else:
            whole.mkdir()
            if root is not None:
                roots.unpack(root, whole, most)
        place = whole.joinpath(*directory.strip("/").split("/"))
        if not place.parent.resolve().is_relative_to(whole.resolve()) or place.is_symlink():
            raise BoxRefusal(f"{directory} leads out of the root {root}", code="member", about=directory)
        place.mkdir(parents=True, exist_ok=True)
        if files is not None:
            roots.copy(files, place)
        yield whole


def _refusal(what: str, key: str) -> SlimxError:
    return SlimxError(f"{key}: {what}", code="box.option", about=key)
