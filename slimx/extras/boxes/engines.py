"""Podman or Docker by its command line: finds the one that works, runs its commands, and cleans up after killed
runs."""

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
"""Label of containers and images that identifies the process that owns them."""
PIECE = 2**20
"""Maximum number of bytes read at a time."""
CALL_S = 120.0
"""Default deadline in seconds for one engine command."""
MAX_QUOTED = 500
"""Maximum length of engine output that an error message quotes, in characters."""


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """Container engine, identified by the command that starts it."""

    words: tuple[str, ...]
    """Program and global options, such as ("podman", "--runtime", "runc")."""

    @classmethod
    def find(cls, words: Sequence[str] = ()) -> ContainerEngine:
        """Returns the engine that the command `words` starts; without `words`, the first of podman and docker that
        works.

        Raises SlimxError, with the error of every candidate, if none works.
        """
        problems = []
        candidates = [tuple(words)] if words else [(name,) for name in KNOWN]
        for candidate in candidates:
            engine = cls(candidate)
            try:
                listing = engine.ask("ps", "--quiet")
            except BoxLost as error:
                problems.append(str(error))
                continue
            if listing.returncode == 0:
                return engine
            problems.append(f"{candidate[0]}: {listing.stderr.strip()[-MAX_QUOTED:]}")
        raise SlimxError(
            f"no container engine works ({'; '.join(problems)}); install podman, start the Docker daemon, or set the "
            "option `engine` to the command line of a working engine",
            code="box.engine",
            about=" ".join(words or KNOWN),
        )

    def ask(
        self, *words: str, stdin: IO[bytes] | None = None, seconds: float = CALL_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs one engine command and returns its exit status and output. `words`: arguments of the command. Raises
        BoxLost if it cannot be run or takes longer than `seconds`."""
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
            raise self._lost(words, f"no result within {seconds:g} s") from None
        except OSError as error:
            raise self._lost(words, str(error)) from error

    def call(self, *words: str, stdin: IO[bytes] | None = None, seconds: float = CALL_S) -> str:
        """Runs one engine command and returns its standard output. Raises BoxLost if it fails."""
        done = self.ask(*words, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise self._lost(words, done.stderr.strip()[-MAX_QUOTED:])
        return done.stdout.strip()

    def save(self, *words: str, to: Path, most: int, seconds: float) -> bool:
        """Writes the standard output of one engine command to the file `to`.

        Returns False if the output exceeds `most` bytes. Raises BoxLost if the command fails or takes longer than
        `seconds`.
        """
        with to.open("wb") as written, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self.words, *words],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            assert process.stdout is not None
            # Kills the whole process group, because children of the client would keep the pipe open.
            timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            try:
                while piece := process.stdout.read(PIECE):
                    if written.tell() + len(piece) > most:
                        return False
                    written.write(piece)
                status = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()
            if status != 0:
                errors.seek(0)
                message = errors.read().decode(errors="replace").strip()[-MAX_QUOTED:]
                raise self._lost(words, message or f"status {status}")
        return True

    def has_image(self, name: str) -> bool:
        """Returns True if the engine has the image `name` on this machine; does not pull it."""
        if name.startswith("-"):  # the engine would parse the name as an option
            return False
        return self.ask("image", "inspect", "--format", "{{.Id}}", name).returncode == 0

    def no_image(self, name: str) -> BoxRefusal:
        return BoxRefusal(
            f"{self.words[0]} has no image {name} on this machine; pull the image with `{' '.join(self.words)} pull "
            f"{name}`, or build the image",
            code="source",
            about=name,
        )

    def sweep(self) -> int:
        """Removes containers and images whose owners have died, and returns how many it removed. Keeps those that
        belong to other machines or PID namespaces, whose processes this process cannot see."""
        removed = 0
        for kind, listing in (("container", ("ps", "--all")), ("image", ("images",))):
            ids = self.call(*listing, "--quiet", "--no-trunc", "--filter", f"label={OWNER}").split()
            for container in dict.fromkeys(ids):
                label = self.ask(kind, "inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', container)
                if label.returncode == 0 and has_died(label.stdout.strip()):
                    words = ("rm", "--force", "--volumes") if kind == "container" else ("rmi", "--force")
                    removed += self.ask(*words, container).returncode == 0
        return removed

    def _lost(self, words: Sequence[str], reason: str) -> BoxLost:
        return BoxLost(f"{' '.join([*self.words, words[0]])} failed: {reason}", about=self.words[0])


def owner() -> str:
    """Returns the container label that marks a sandbox as owned by this process."""
    return f"{_pid_namespace()}/{os.getpid()}/{_started(os.getpid())}"


def has_died(label: str) -> bool:
    """Returns True if `label` identifies a process on this machine that has ended."""
    namespace, _, process = label.partition("/")
    pid, _, started = process.partition("/")
    return namespace == _pid_namespace() and pid.isdecimal() and _started(int(pid)) != started


def _pid_namespace() -> str:
    """Returns the host name and the PID namespace, which together make process ids unique."""
    return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str | None:
    """Returns the start time of a process in clock ticks after boot; None if there is no such process."""
    try:
        # Field 22 of stat, see proc(5); the name in field 2 may contain anything up to the last parenthesis.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
