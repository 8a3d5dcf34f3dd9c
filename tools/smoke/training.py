"""A run of `slimx train` that is observed from outside, by its process and its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.steps import ROOT, Failed

END_S = 60.0


class TrainingRun:
    """A run directory whose run may be started several times."""

    def __init__(self, directory: Path, log: Path, arguments: Sequence[str], seconds: float, env: Mapping[str, str]):
        """Prepares a run. `arguments`: arguments of `slimx train`; `seconds`: deadline of each wait."""
        self.directory, self.log, self.seconds = directory, log, seconds
        self._arguments, self._env = [*arguments], dict(env)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slimx.cli", "train", *self._arguments, *more],
                cwd=ROOT,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until `condition` is true. Raises Failed if the run ends first or the deadline passes."""
        end = time.monotonic() + self.seconds
        while not condition():
            if (status := self.process.poll()) is not None:
                raise Failed(f"the run ended with status {status}: {self.log.read_text().strip().splitlines()[-1:]}")
            if time.monotonic() > end:
                raise Failed(f"waited {self.seconds:.0f} s for {what}")
            time.sleep(0.2)

    def end(self) -> int:
        """Waits for the end of the run and returns its exit status."""
        try:
            return self.process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"waited {self.seconds:.0f} s for the end of the run") from None

    def stop(self) -> None:
        """Stops the run if it is still alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def rows(self) -> list[dict]:
        file = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def step(self) -> int:
        """Returns the last finished step."""
        return max((row["step"] for row in self.rows()), default=0)

    def metric(self, key: str) -> float:
        """Returns a metric of the last step; 0 if the step does not have it."""
        last = max(self.rows(), key=lambda row: row["step"], default={"metrics": {}})
        return float(last["metrics"].get(key) or 0.0)
