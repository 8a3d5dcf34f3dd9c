"""Root directories of sandboxes on this machine: created from an archive or a directory, locked while their owner
lives, measured, copied and removed.

    BASE/slimx-box-RANDOM/lock    locked by the owning process: the kernel unlocks it when that process dies
    BASE/slimx-box-RANDOM/root    the sandbox's files; owned by an unprivileged user (65534) if slimx runs as root
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
from slimx.extras.boxes.archives import Archive, sparse_parts
from slimx.extras.boxes.programs.enclosure import MIB, NOBODY
from slimx.extras.boxes.protocol import BoxRefusal

PREFIX = "slimx-box-"
COPY_S = 600.0
"""Deadline in seconds for copying or removing a root."""
ENTRY = 4096
"""Bytes charged for each file, directory or link in addition to its content."""
SPARSE_PART = 256
"""Bytes charged for each part of a sparse file in addition to its content, to account for the memory that the part's
record takes."""
UNPACKED = 9
"""Maximum ratio of a root file system's counted size to the size of its archive. It allows for small files, which take
at least 512 bytes in the archive and count as `ENTRY` bytes."""


@dataclass(frozen=True, slots=True)
class Root:
    holder: Path
    lock: int
    """Descriptor of the lock file, which stays locked while the owner process runs."""

    @property
    def path(self) -> Path:
        return self.holder / "root"

    def remove(self) -> None:
        """Removes the root, however deeply nested, and its lock."""
        _remove(self.holder)
        os.close(self.lock)


def make(source: Path, base: Path | None, image_mib: int, *, host_usr: bool = False) -> Root:
    """Creates a root directory from `source`, a tar archive (possibly compressed) or a directory.

    `base`: parent directory; None for the temporary directory. `image_mib`: maximum size in MiB. `host_usr`: True to
    link the programs of /usr into the root. Raises BoxRefusal for an unusable source.
    """
    if not source.exists():
        raise no_source(source)
    root = allocate(base or Path(tempfile.gettempdir()))
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
        f"the image or root directory {source} does not exist; give the path of an existing tar archive or directory",
        code="source",
        about=str(source),
    )


def add_links(root: Path) -> None:
    """Creates in `root` the symbolic links bin, lib and lib64, which point to usr/bin, usr/lib and usr/lib64. A link is
    omitted if this machine does not have it or the root already has an entry of that name."""
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}") and not os.path.lexists(root / name):
            os.symlink(f"usr/{name}", root / name)


def sweep(base: Path | None = None) -> int:
    """Removes the roots in `base` whose owners have died, and returns how many it removed."""
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
    """Copies a tree with its links, owners and modes."""
    _call("cp", "-a", "--no-target-directory", "--", str(source), str(to))


def used(path: Path, outermost: int | None = None, *, most: float = math.inf) -> int:
    """Returns the number of bytes that a tree occupies, including `ENTRY` bytes per entry and deleted files that are
    still open.

    `outermost`: process whose descendants may have deleted files open. Stops counting once the number exceeds `most`,
    because a program may add entries faster than they are counted. Returns 2^62 for a tree that cannot be read
    completely.
    """
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
        except FileNotFoundError:  # a program has deleted it
            continue
        except OSError:  # too deep or not readable, so its content is unknown
            return 2**62
    if outermost is not None:
        total += _deleted(path, outermost)
    return total


def _deleted(path: Path, outermost: int) -> int:
    try:
        descendants = psutil.Process(outermost).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0
    return deleted([process.pid for process in descendants], path.lstat().st_dev)


def deleted(processes: Iterable[int], device: int | None = None) -> int:
    """Returns the total size, in bytes, of deleted files that `processes` have open. `device`: if given, only files on
    this device are counted."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    file = descriptor.stat()
                    if file.st_nlink == 0 and device in (None, file.st_dev) and stat.S_ISREG(file.st_mode):
                        sizes[file.st_dev, file.st_ino] = ENTRY + file.st_blocks * 512
    return sum(sizes.values())


def allocate(base: Path, *, private: bool = False) -> Root:
    """Creates the directory that contains a root. If its owner dies, `sweep` removes the directory.

    `private`: True to make the directory accessible to this user only, and thus inaccessible to sandboxed programs.
    """
    holder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    if not private:
        holder.chmod(0o711)
    lock = os.open(holder / "locking", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(holder / "locking", holder / "lock")  # locked before `sweep` can find it
    return Root(holder, lock)


@contextlib.contextmanager
def scratch(base: Path) -> Iterator[Root]:
    """Yields a private directory for files of a sandbox, and removes it after the block, however deeply nested."""
    root = allocate(base, private=True)
    try:
        yield root
    finally:
        root.remove()


@contextlib.contextmanager
def unpacked(to: Path) -> Iterator[Path]:
    """Yields a path at which the block must write a tar archive; after the block, the archive is unpacked to the new
    directory `to`."""
    with scratch(to.parent) as root:
        archive = root.holder / "root.tar"
        yield archive
        root.path.mkdir()
        unpack(archive, root.path, archive.stat().st_size * UNPACKED)
        root.path.rename(to)


def unpack(archive: Path, to: Path, most: int) -> None:
    """Unpacks a tar archive, possibly compressed, of at most `most` bytes when unpacked. Raises BoxRefusal if it is
    larger or cannot be used."""
    total = 0

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal total
        parts = sparse_parts(member)
        total += max(member.size, sum(size for _, size in parts)) + ENTRY + SPARSE_PART * len(parts)
        if total > most:
            raise too_large(archive, most)
        if member.issym() and os.path.isabs(member.linkname):
            # Makes absolute links relative, because they refer to the image's root.
            above = os.path.dirname("/" + member.name.strip("/"))
            member = member.replace(linkname=os.path.relpath(member.linkname, above), deep=False)
        return tarfile.data_filter(member, path)

    try:
        with Archive.open(archive) as image:
            image.extractall(to, filter=checked)
    except tarfile.FilterError as error:
        name = error.tarinfo.name
        raise BoxRefusal(
            f"the image {archive} contains {name}, which cannot be unpacked safely ({error}); build the image without "
            f"{name}",
            code="member",
            about=name,
        ) from None
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BoxRefusal(
            f"the image {archive} cannot be unpacked ({error}); use a complete tar archive",
            code="image",
            about=str(archive),
        ) from error


def pack(
    source: Path, to: IO[bytes], most: int, change: Callable[[tarfile.TarInfo], tarfile.TarInfo] = lambda member: member
) -> None:
    """Writes a directory as a tar archive of up to `most` bytes.

    Holes of sparse files count, because the archive stores them as zeros. `change`: function that edits each member.
    Raises BoxRefusal before writing a file that would make the archive exceed the limit.
    """
    total = 0

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal total
        total += member.size + ENTRY
        if total > most:
            raise too_large(source, most)
        return change(member)

    with tarfile.open(fileobj=to, mode="w") as written:
        written.add(source, ".", filter=counted)


def too_large(source: Path, most: int) -> BoxRefusal:
    return BoxRefusal(
        f"the files of {source} exceed the {most // MIB} MiB that the option image_mib allows; raise image_mib",
        code="large",
        about=str(source),
    )


def _remove(holder: Path) -> None:
    """Removes a directory with the `rm` program, which is safe against links and works at any depth, because it
    resolves every name relative to an open directory."""
    if os.geteuid() != 0:
        _call("chmod", "-R", "u+rwX", "--", str(holder))
    _call("rm", "-rf", "--one-file-system", "--", str(holder))


def _call(*line: str) -> None:
    """Runs a coreutils program. Raises SlimxError if it fails or takes too long."""
    program = shutil.which(line[0]) or line[0]
    try:
        done = subprocess.run([program, *line[1:]], capture_output=True, text=True, timeout=COPY_S)
    except subprocess.TimeoutExpired:
        problem = f"no result within {COPY_S:g} s"
    else:
        if done.returncode == 0:
            return
        problem = done.stderr.strip()[-300:]
    raise SlimxError(
        f"`{line[0]}` failed on the directory {line[-1]} of a sandbox ({problem}); make the directory "
        "writable for this user, or free up space on its disk",
        code="box.files",
        about=line[-1],
    )
