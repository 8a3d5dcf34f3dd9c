"""Podman or Docker by its command line: which of them runs here, and what killed runs have left with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slimx.errors import SlimxError
from slimx.extras.boxes.protocol import BoxLost, BoxRefusal

KNOWN = ("podman", "docker")
OWNER = "slimx.owner"
"""Label of containers and images that a box has made: which process it belongs to."""
PIECE = 2**20
"""Bytes that are read at once."""
CALL_S = 120.0
"""Seconds for one call of the engine."""
MAX_SAID = 500
"""Characters that an error repeats of what the engine wrote."""


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """One engine, and the words that start it."""

    words: tuple[str, ...]
    """Program and general options, as ("podman", "--runtime", "runc")."""

    @classmethod
    def find(cls, words: Sequence[str] = ()) -> ContainerEngine:
        """The engine that `words` start, else the first of podman and docker that answers. Raises SlimxError with what
        each of them said."""
        said = []
        for candidate in [tuple(words)] if words else [(name,) for name in KNOWN]:
            engine = cls(candidate)
            try:
                asked = engine.ask("ps", "--quiet")
            except BoxLost as error:
                said.append(str(error))
                continue
            if asked.returncode == 0:
                return engine
            said.append(f"{candidate[0]}: {asked.stderr.strip()[-MAX_SAID:]}")
        raise SlimxError(
            f"no container engine answers ({'; '.join(said)}); install podman, start Docker's service, or name the "
            "program and its options",
            code="box.engine",
            about=" ".join(words or KNOWN),
        )

    def ask(
        self, *words: str, stdin: IO[bytes] | None = None, seconds: float = CALL_S
    ) -> subprocess.CompletedProcess[str]:
        """Run one command, and have its status and what it wrote. Raises BoxLost if it cannot run or takes too long."""
        try:
            return subprocess.run(
                [*self.words, *words],
                stdin=stdin or subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise self._lost(words, f"not done after {seconds:g} s") from None
        except OSError as error:
            raise self._lost(words, str(error)) from error

    def call(self, *words: str, stdin: IO[bytes] | None = None, seconds: float = CALL_S) -> str:
        """Run one command; what it wrote to standard output. Raises BoxLost if it fails."""
        done = self.ask(*words, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise self._lost(words, done.stderr.strip()[-MAX_SAID:])
        return done.stdout.strip()

    def save(self, *words: str, to: Path, most: int, seconds: float) -> bool:
        """Write what one command writes to standard output, of up to `most` bytes, into the file `to`; False if it is
        more. Raises BoxLost if the command fails, or takes longer than `seconds`."""
        with to.open("wb") as written, tempfile.TemporaryFile() as said:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": said}
            process = subprocess.Popen([*self.words, *words], start_new_session=True, **pipes)
            # The whole group: what the client started would keep the pipe open.
            late = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
            late.start()
            try:
                while piece := process.stdout.read(PIECE):
                    if written.tell() + len(piece) > most:
                        return False
                    written.write(piece)
                status = process.wait()
            finally:
                late.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()
            if status != 0:
                said.seek(0)
                raise self._lost(words, said.read().decode(errors="replace").strip()[-MAX_SAID:] or f"status {status}")
        return True

    def has_image(self, name: str) -> bool:
        """True if the engine has the image; nothing is pulled."""
        if name.startswith("-"):  # which would be an option
            return False
        return self.ask("image", "inspect", "--format", "{{.Id}}", name).returncode == 0

    def no_image(self, name: str) -> BoxRefusal:
        return BoxRefusal(
            f"{self.words[0]} has no image {name}; pull or build it on this machine first", code="source", about=name
        )

    def sweep(self) -> int:
        """Remove containers and images of boxes whose owners have died; how many there were. Those of other machines
        and process name spaces, of which nobody here knows, stay."""
        removed = 0
        for kind, listed in (("container", ("ps", "--all")), ("image", ("images",))):
            ids = self.call(*listed, "--quiet", "--no-trunc", "--filter", f"label={OWNER}").split()
            for each in dict.fromkeys(ids):
                asked = self.ask(kind, "inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', each)
                if asked.returncode == 0 and has_died(asked.stdout.strip()):
                    words = ("rm", "--force", "--volumes") if kind == "container" else ("rmi", "--force")
                    removed += self.ask(*words, each).returncode == 0
        return removed

    def _lost(self, words: Sequence[str], what: str) -> BoxLost:
        return BoxLost(f"{' '.join([*self.words, words[0]])} failed: {what}", about=self.words[0])


def owner() -> str:
    """This process, as the label says it."""
    return f"{_place()}/{os.getpid()}/{_started(os.getpid())}"


def has_died(label: str) -> bool:
    """True if the label is that of a process of this machine that has ended."""
    place, _, process = label.partition("/")
    pid, _, began = process.partition("/")
    return place == _place() and pid.isdecimal() and _started(int(pid)) != began


def _place() -> str:
    """Host name and process name space: a process number means something only there."""
    return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str | None:
    """Clock ticks after boot at which a process began; None if there is none."""
    try:
        # proc(5), stat: field 22; the name in field 2 may hold anything up to the last parenthesis.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
