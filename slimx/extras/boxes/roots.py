"""Root directories of boxes on this machine: made from an archive or a directory, held while their owner lives,
measured, copied and removed.

    BASE/slimx-box-RANDOM/lock   locked by the process that owns the box: the kernel unlocks it when that process dies
    BASE/slimx-box-RANDOM/root   the box's files; as root they belong to nobody
"""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import math
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from slimx.errors import SlimxError
from slimx.extras.boxes.archives import Archive
from slimx.extras.boxes.programs.enclosure import MIB, NOBODY
from slimx.extras.boxes.protocol import BoxRefusal

PREFIX = "slimx-box-"
COPY_S = 600.0
"""Seconds for copying or removing a root."""
ENTRY = 4096
"""Bytes that a file, directory or link counts besides its content."""
SPARSE_PART = 256
"""Bytes that a part of a sparse file counts besides its content: what it takes in memory."""
UNPACKED = 9
"""An archive has 512 bytes for an entry at least, so that it holds no more than this many times its size."""


@dataclass(frozen=True, slots=True)
class Root:
    holder: Path
    lock: int
    """The descriptor whose lock says that the owner lives."""

    @property
    def path(self) -> Path:
        return self.holder / "root"

    def remove(self) -> None:
        """Remove it, however deep the box made its directories."""
        _remove(self.holder)
        os.close(self.lock)


def make(source: Path, base: Path | None, image_mib: int, *, host_usr: bool = False) -> Root:
    """A new root with what is in `source`, a tar archive (also compressed) or a directory, of up to `image_mib` MiB.
    `base`: the directory to make it in; the one for temporary files if None. `host_usr`: its programs are those of
    /usr. Raises BoxRefusal."""
    if not source.exists():
        raise no_source(source)
    root = hold(base or Path(tempfile.gettempdir()))
    try:
        if source.is_dir():
            copy(source, root.path)
        else:
            root.path.mkdir()
            unpack(source, root.path, image_mib * MIB)
        if host_usr:
            add_links(root.path)
        os.chmod(root.path, 0o755)
        if os.geteuid() == 0:
            _call("chown", "-hR", f"{NOBODY}:{NOBODY}", "--", str(root.path))
        if used(root.path, most=image_mib * MIB) > image_mib * MIB:
            raise too_large(source, image_mib * MIB)
    except BaseException:
        root.remove()
        raise
    return root


def no_source(source: Path) -> BoxRefusal:
    return BoxRefusal(
        f"there is no image or root directory {source}; give a tar archive or a directory",
        code="source",
        about=str(source),
    )


def add_links(root: Path) -> None:
    """Give a root without programs of its own the links to those of /usr, where nothing is in their place."""
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}") and not os.path.lexists(root / name):
            os.symlink(f"usr/{name}", root / name)


def sweep(base: Path | None = None) -> int:
    """Remove the roots whose owners have died; how many there were."""
    removed = 0
    for holder in (base or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        if holder.is_symlink() or holder.lstat().st_uid != os.geteuid():
            continue
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = os.open(holder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(holder)
                removed += 1
            finally:
                os.close(lock)
    return removed


def copy(source: Path, to: Path) -> None:
    """Copy a tree with its links, owners and modes."""
    _call("cp", "-a", "--no-target-directory", "--", str(source), str(to))


def used(path: Path, outermost: int | None = None, *, most: float = math.inf) -> int:
    """Returns the bytes that the tree occupies, entries included, with files that were deleted and are still open in
    the processes below `outermost`. Stops counting above `most`, since a program may add entries faster than they are
    counted. A tree that cannot be read to its end counts as unbounded."""
    total = 0
    waiting = [os.fspath(path)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if total > most:
                        return total
                    with contextlib.suppress(FileNotFoundError):
                        total += ENTRY + entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError:  # too deep, or closed to us: nobody knows what is in there
            return 2**62
    return total + (_deleted(path, outermost) if outermost is not None else 0)


def _deleted(path: Path, outermost: int) -> int:
    try:
        below = [each.pid for each in psutil.Process(outermost).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return deleted(below, path.lstat().st_dev)


def deleted(processes: Iterable[int], device: int | None = None) -> int:
    """Bytes of files that were deleted and are still open in these processes: of `device`, or of any."""
    found = {}
    for pid in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for each in descriptors:
                with contextlib.suppress(OSError):
                    file = each.stat()
                    if file.st_nlink == 0 and device in (None, file.st_dev) and stat.S_ISREG(file.st_mode):
                        found[file.st_dev, file.st_ino] = ENTRY + file.st_blocks * 512
    return sum(found.values())


def hold(base: Path, *, private: bool = False) -> Root:
    """A place for a root, which `sweep` removes if its owner dies. `private`: nobody else enters it, as boxes must."""
    holder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    if not private:
        holder.chmod(0o711)
    lock = os.open(holder / "locking", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(holder / "locking", holder / "lock")  # a sweep never sees it unlocked
    return Root(holder, lock)


@contextlib.contextmanager
def scratch(base: Path) -> Iterator[Root]:
    """A private place for what a box has made, removed at the end however deep it is."""
    made = hold(base, private=True)
    try:
        yield made
    finally:
        made.remove()


@contextlib.contextmanager
def unpacked(to: Path) -> Iterator[Path]:
    """A path to write a tar archive to inside the block, which is then unpacked to the new directory `to`."""
    with scratch(to.parent) as place:
        archive = place.holder / "root.tar"
        yield archive
        place.path.mkdir()
        unpack(archive, place.path, archive.stat().st_size * UNPACKED)
        place.path.rename(to)


def unpack(archive: Path, to: Path, most: int) -> None:
    """Unpack a tar archive, also a compressed one, of up to `most` bytes. Raises BoxRefusal."""
    taken = 0

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal taken
        parts = member.sparse or ()
        taken += max(member.size, sum(size for _, size in parts)) + ENTRY + SPARSE_PART * len(parts)
        if taken > most:
            raise too_large(archive, most)
        if member.issym() and os.path.isabs(member.linkname):
            # An image's absolute links begin at its own root.
            above = os.path.dirname("/" + member.name.strip("/"))
            member = member.replace(linkname=os.path.relpath(member.linkname, above), deep=False)
        return tarfile.data_filter(member, path)

    try:
        with Archive.open(archive) as image:
            image.extractall(to, filter=checked)
    except tarfile.FilterError as error:
        name = error.tarinfo.name
        raise BoxRefusal(
            f"the image {archive} has {name}, which leads out of it or is a device; make the image without it",
            code="member",
            about=name,
        ) from None
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BoxRefusal(
            f"the image {archive} cannot be unpacked ({error}); give a whole tar archive", code="image",
            about=str(archive),
        ) from error  # fmt: skip


def pack(
    source: Path, to: IO[bytes], most: int, change: Callable[[tarfile.TarInfo], tarfile.TarInfo] = lambda member: member
) -> None:
    """Write a directory as a tar archive of files of up to `most` bytes, holes counted: an archive has them as zeros.
    `change`: of each member. Raises BoxRefusal for more, before the file that is too much is written."""
    taken = 0

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal taken
        taken += member.size + ENTRY
        if taken > most:
            raise too_large(source, most)
        return change(member)

    with tarfile.open(fileobj=to, mode="w") as written:
        written.add(source, ".", filter=counted)


def too_large(source: Path, most: int) -> BoxRefusal:
    return BoxRefusal(
        f"{source} takes more than the {most // MIB} MiB that a box begins with at most; raise image_mib",
        code="large",
        about=str(source),
    )


def _remove(holder: Path) -> None:
    """rm goes down by descriptors, so that no depth and no link leads it astray."""
    if os.geteuid() != 0:
        _call("chmod", "-R", "u+rwX", "--", str(holder))
    _call("rm", "-rf", "--one-file-system", "--", str(holder))


def _call(*line: str) -> None:
    """Run a program of coreutils. Raises SlimxError if it fails or takes too long."""
    program = shutil.which(line[0]) or line[0]
    try:
        done = subprocess.run([program, *line[1:]], capture_output=True, text=True, timeout=COPY_S)
    except subprocess.TimeoutExpired:
        problem = f"not done after {COPY_S:g} s"
    else:
        if done.returncode == 0:
            return
        problem = done.stderr.strip()[-300:]
    raise SlimxError(
        f"{line[0]} failed on the root of a box, {line[-1]}: {problem}; see that its disk has space",
        code="box.files",
        about=line[-1],
    )
