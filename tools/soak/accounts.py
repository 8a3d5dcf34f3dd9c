"""Accounts for a run's prompts: each admitted prompt was trained, was dropped for a reason, or is still open.

A run numbers its prompts as it admits them. The group of prompt 12 is `g12` in all files: in those of the steps that
trained it, in dropped.jsonl, and in the tickets of a checkpoint, which also records the number of admitted prompts.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from slimx.data.saved.step_files import DIRECTORY, file_name, read_step
from slimx.orchestration.state.saves import Saves, read_state
from slimx.rollout.flow.manager import TOO_OLD


@dataclass
class Account:
    """The fate of every admitted prompt of a run, up to a checkpoint."""

    step: int
    """Step of the checkpoint."""
    admitted: int
    trained: int
    dropped: dict[str, int]
    """Number of dropped prompts by reason."""
    open: int
    problems: list[str] = field(default_factory=list)
    """Sentences on prompts that are missing or counted twice."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"step {self.step}: {self.admitted} admitted = {self.trained} trained + {sum(self.dropped.values())} "
            f"dropped ({reasons}) + {self.open} open"
        )


class Ledger:
    """Reads a run's directory repeatedly; each step that a checkpoint covers is read once."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._trained: dict[int, list[int]] = {}
        """Step -> numbers of the prompts that it trained."""

    def account(self) -> Account | None:
        """Returns the account up to the newest checkpoint; None before the first. The run must not write meanwhile."""
        newest = Saves(self.run / "checkpoints", keep=1).newest()
        if newest is None:
            return None
        state = read_state(newest)
        for step in range(len(self._trained) + 1, state.step + 1):
            _, groups = read_step(self.run / DIRECTORY / file_name(step))
            self._trained[step] = [number_of(group.id) for group in groups]
        dropped = [(number_of(line["group"]), line["reason"]) for line in self._lines("dropped", state.step)]
        # Those that the next step's records will name.
        dropped += [(number_of(entry["group"]), entry["reason"]) for entry in state.rollouts["dropped"]]
        return balance(
            state.step,
            state.rollouts["next"],
            [number for step in range(1, state.step + 1) for number in self._trained[step]],
            [(number, reason) for number, reason in dropped if reason != TOO_OLD],  # made anew under the same number
            [ticket.number for ticket in state.rollouts["tickets"]],
            [line["step"] for line in self._lines("metrics", state.step) if line["step"] > 0],
        )

    def _lines(self, name: str, last: int) -> list[dict]:
        """Returns the lines of steps up to `last` from one of the run's files."""
        file = self.run / f"{name}.jsonl"
        lines = [json.loads(line) for line in file.open()] if file.exists() else []
        return [line for line in lines if line["step"] <= last]


def balance(
    step: int,
    admitted: int,
    trained: list[int],
    dropped: list[tuple[int, str]],
    still_open: list[int],
    recorded: list[int],
) -> Account:
    """Checks that each of the first `admitted` prompts occurs exactly once among the trained, dropped and open prompts,
    and each step from 1 to `step` once in `recorded`."""
    found = Counter([*trained, *(number for number, _ in dropped), *still_open])
    problems = [f"prompt {number} is nowhere" for number in range(admitted) if number not in found]
    problems += [f"prompt {number} is in {count} places" for number, count in sorted(found.items()) if count > 1]
    problems += [f"prompt {number} was never admitted" for number in sorted(found) if number >= admitted]
    steps = Counter(recorded)
    problems += [f"step {index} has {steps[index]} records" for index in range(1, step + 1) if steps[index] != 1]
    reasons = Counter(reason for _, reason in dropped)
    return Account(step, admitted, len(trained), dict(reasons), len(still_open), problems)


def number_of(group: str) -> int:
    """Returns the number of a group's prompt."""
    return int(group.removeprefix("g"))
