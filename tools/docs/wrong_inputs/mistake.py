"""The form of a wrong input, and the small valid run that it changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RUN = """\
run: {name: sums, dir: runs/sums}
model: {path: model}
numerics: {dtype: float32}
cluster: {device: cpu}
rollout:
  prompts: prompts.jsonl
  prompts_per_step: 2
  group_size: 2
  max_prompt_tokens: 64
  engines: [{name: actor, max_total_tokens: 32768}]
  sampling: {max_new_tokens: 4}
schedule: {steps: 2}
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that new users make."""

    name: str
    command: str
    """Arguments after `slimx`."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Changed or additional files of the run's directory, by path."""


def prompts(*lines: Any) -> dict[str, str]:
    """Returns the prompt file with `lines`, each a text or a value that is written as JSON."""
    return {"prompts.jsonl": "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)}


def hooks(*lines: str) -> dict[str, str]:
    """Returns the module of hooks with `lines`."""
    return {"hooks.py": "\n".join(lines).rstrip() + "\n"}


def script(*lines: str) -> dict[str, str]:
    """Returns the launch script with `lines`."""
    return {"run.sh": "\n".join(lines) + "\n"}
