"""Kernels of csrc/ on threads of the CPU: compiled libraries that are kept from one session of tests to the next."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
THREADS = Path(__file__).with_name("emulated_threads.h")
KEPT = ROOT / "build" / "emulated"
FLAGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-shared", "-fPIC")
PATIENT = "-U_FORTIFY_SOURCE"
"""Without its longjmp, which Ubuntu's compiler takes by default and which leaves no stack for another thread."""


def library(main: Path, sources: Iterable[Path], *flags: str) -> Path:
    """Returns the library of `main`, which includes `sources` by their names alone; compiles it where none is kept.

    It is kept by the digest of all that goes into it: sources, flags and the version of the compiler.
    """
    files = {source.name: source.read_bytes() for source in (*sources, THREADS, main)}
    command = ["g++", *FLAGS, *flags, "-x", "c++", main.name, "-o", "emulator.so"]
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(repr((sorted(files.items()), command, version)).encode(), digest_size=16).hexdigest()
    kept = KEPT / f"{main.stem}-{digest}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{main.stem}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=KEPT) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (Path(folder) / "emulator.so").rename(kept)
    return kept
