"""Keeps the soak's run alive as a supervisor does: starts it, observes it, strikes it and starts it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from slimx.errors import LOST, SlimxError
from slimx.extras.watch.status import run_stacks
from tools.soak.accounts import Account, Ledger
from tools.soak.census import Sample, adopt_orphans, left_in_shared_memory, living, samples
from tools.soak.strikes import Strikes
from tools.soak.task import last_step

ROOT = Path(__file__).parents[2]
LOOK_S = 0.2
END_S = 300.0
"""Deadline in seconds for all processes of an ended run to be gone, and for a run to leave after a signal."""
PREEMPTED = 75
ENDS = {0, LOST, PREEMPTED, 128 + signal.SIGTERM, -signal.SIGKILL}
"""Exit statuses after which a supervisor starts the same command again or is done."""


class Failed(Exception):
    """Raised for events that must not happen in a soak, with one sentence."""


class Soak:
    """A run directory, and all observations of its processes."""

    def __init__(self, config: Path, steps: int, strikes: Strikes, *, seconds: float, sample_s: float, stall_s: float):
        """Prepares a soak. `seconds`: time for all of it; `sample_s`: seconds between two samples of the processes;
        `stall_s`: longest time without a step."""
        self.config, self.steps, self.strikes = config, steps, strikes
        self.out = config.parent
        self.run = self.out / "run"
        self.until, self.sample_s, self.stall_s = time.monotonic() + seconds, sample_s, stall_s
        self.ledger = Ledger(self.run)
        self.accounts: list[Account] = []
        file = self.out / "samples.jsonl"
        self.samples = [Sample(**json.loads(line)) for line in file.open()] if file.exists() else []
        self.ends: Counter[int] = Counter()
        """Exit status -> number of ends of the run with it."""
        self.unasked = 0
        """Number of ends that no strike explains."""
        self.left: list[str] = []
        """Files that ended runs left in /dev/shm."""
        self.began = time.monotonic()
        self.seconds = 0.0

    def go(self) -> None:
        """Runs until the last step or the end of the time. Raises Failed."""
        adopt_orphans()
        try:
            while (step := last_step(self.run)) < self.steps and time.monotonic() < self.until:
                self._once()
                print(f"soak: {self.accounts[-1] if self.accounts else f'step {step}'}", file=sys.stderr, flush=True)
        finally:
            self.seconds = time.monotonic() - self.began
            for _, process in living():
                process.kill()

    def _once(self) -> None:
        """Runs one process of the run, from its start to its end."""
        before = set(os.listdir("/dev/shm"))
        with (self.out / "train.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slimx.cli", "train", str(self.config)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        status = self._watch(process)
        self.ends[status] += 1
        if time.monotonic() < self.until:  # else it was asked to leave
            if self.strikes.pending is not None:
                self.strikes.pending.ended = True
            elif status:
                self.unasked += 1
        self._all_gone()
        self.left += left_in_shared_memory(before)
        if status not in ENDS:
            raise Failed(f"the run ended with status {status}: {self._last_output()}")
        if (account := self.ledger.account()) is not None:
            self.accounts.append(account)

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        """Samples the run's processes and lets `strikes` kill some while it lives; returns its exit status."""
        step = last_step(self.run)
        moved = sampled = time.monotonic()
        leaving = False
        with (self.out / "samples.jsonl").open("a") as file:
            while (status := process.poll()) is None:
                time.sleep(LOOK_S)
                now, present = time.monotonic(), last_step(self.run)
                if present != step:
                    step, moved = present, now
                if now > moved + self.stall_s:
                    self._stalled(process, step)
                if now > self.until + END_S:
                    raise Failed(f"asked to leave, the run was still there after {END_S:.0f} s")
                if now > self.until and not leaving:
                    process.send_signal(signal.SIGUSR1)
                    leaving = True
                if not leaving:
                    self.strikes.look(step)
                if now > sampled + self.sample_s and self.strikes.pending is None and present < self.steps:
                    found = list(samples(step))
                    file.writelines(json.dumps(sample.row()) + "\n" for sample in found)
                    file.flush()
                    self.samples += found
                    sampled = now
        return status

    def _stalled(self, process: subprocess.Popen[bytes], step: int) -> None:
        try:
            stacks = run_stacks(self.run)
        except SlimxError as error:
            stacks = str(error)
        (self.out / "stalled.txt").write_text(stacks)
        process.kill()
        last = self.strikes.done[-1:] or "nothing"
        raise Failed(f"no step after {step} for {self.stall_s:.0f} s, after {last}; see {self.out / 'stalled.txt'}")

    def _all_gone(self) -> None:
        end = time.monotonic() + END_S
        while left := living():
            if time.monotonic() > end:
                raise Failed(f"{END_S:.0f} s after the end of the run there are still: {[kind for kind, _ in left]}")
            time.sleep(LOOK_S)

    def _last_output(self) -> str:
        return " ".join((self.out / "train.log").read_text().splitlines()[-3:])
