"""Files of the rollouts that a run trained on, one per step: `RUN/rollouts/step-0000012.groups`, each with a second
file of the values that training computed per token (`slimx.data.saved.trained_tokens`).

A file is a line of JSON followed by the step's groups in the order of training, in the encoding of
`slimx.data.saved.codec`. The line's field `about` has the fields of `About`, a description that can be read without the
groups. `slimx rollouts` shows these files, and `rollout.replay` trains on them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group, Trajectory
from slimx.data.saved.codec import encode, load_groups, read_about, save_groups
from slimx.data.saved.trained_tokens import SUFFIX, TrainedTokens, write_trained
from slimx.digest import fingerprint
from slimx.errors import SlimxError
from slimx.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIRECTORY = "rollouts"
"""Name of the run directory's subdirectory that contains the rollout files."""
TOKENIZER = "tokenizer"
"""Name of the run directory's subdirectory that contains a copy of the tokenizer, which decodes the tokens in the
rollout files; that of another policy is in the subdirectory `prefix_of(policy)`."""
_NAME = re.compile(r"step-(\d{7,})\.groups")
_UNRELATED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config")
"""Keys of config.json that may differ between copies of the same model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Properties of the run that generated rollouts. A run that trains on the rollouts again must have the same
    properties."""

    model: Json
    """Contents of the model's config.json, without keys that may differ between copies."""
    vocabulary: str
    """Digest of the tokenizer's tokens and their ids."""
    prompts_per_step: int
    group_size: int
    max_staleness: int
    routes: bool
    """True if the files contain the experts to which each token was routed."""
    policies: list[str] = field(default_factory=lambda: [ACTOR])
    """Names of the policies that the run trains."""

    def differences(self, other: Origin) -> dict[str, str]:
        """Returns, by configuration key, the properties in which `self`, the origin of a file, differs from `other`,
        the origin of the run that would train on the file. Each difference is worded as a clause of an error
        message."""
        clauses = {}
        keys = sorted(self.model.keys() | other.model.keys())
        changed = [key for key in keys if self.model.get(key) != other.model.get(key)]
        if changed:
            clauses["config.json"] = (
                f"another model sampled it ({changed[0]} of its config.json is {self.model.get(changed[0])}, but "
                f"{other.model.get(changed[0])} in model.path)"
            )
        elif self.vocabulary != other.vocabulary:
            clauses["vocabulary"] = (
                "it was generated with another tokenizer (model.path has the same model, but another vocabulary)"
            )
        for key in ("rollout.prompts_per_step", "rollout.group_size", "schedule.max_staleness"):
            field_name = key.partition(".")[2]
            saved = getattr(self, field_name)
            current = getattr(other, field_name)
            if saved != current:
                clauses[key] = f"it was generated with {key}={saved}, but this run has {current}"
        if set(self.policies) != set(other.policies):
            clauses["policies"] = (
                f"it has trajectories of the policies {' and '.join(self.policies)}, but this run trains "
                f"{' and '.join(other.policies)}"
            )
        return clauses


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Description of one step's groups, stored in the header of the step's file."""

    step: int
    version: int
    """Version of the trainers' weights in this step."""
    groups: int
    trajectories: int
    sampled_tokens: int
    reward: float | None
    """Mean reward of all trajectories; None if none has a reward."""
    oldest: int | None
    """Version of the oldest weights that sampled a token; None if nothing was sampled."""
    truncated: int
    """Number of truncated trajectories."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of groups dropped during the step, by reason."""
    origin: Origin


def origin_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """Returns the origin that is saved with the rollouts of a run with this configuration and tokenizer: the properties
    that a run must share to train on these rollouts."""
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    return Origin(
        model={key: value for key, value in model.items() if key not in _UNRELATED},
        vocabulary=fingerprint(encode(sorted(tokenizer.get_vocab().items()))),
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        max_staleness=config.schedule.max_staleness,
        routes=config.track.rollouts.routes,
        policies=config.trained,
    )


class StepFiles:
    """Writer of a run's rollout files."""

    def __init__(self, directory: Path, origin: Origin, *, every: int, keep: int, resume_step: int):
        """Removes the files of `resume_step` and later steps, because the run repeats these steps. `every`: number of
        steps between files, or 0 to write none; `keep`: number of newest files to keep, or 0 to keep all."""
        self.directory = directory
        self.origin = origin
        self.every = every
        self.keep = keep
        for step, path in step_files(directory).items():
            if step >= resume_step:
                _remove(path)

    def due(self, step: int) -> bool:
        """Returns True if a file is written for `step`, counted from 1. Files are written every `every` steps, starting
        with step 1; never if `every` is 0."""
        return self.every > 0 and (step - 1) % self.every == 0

    def write(self, step: int, version: int, groups: Sequence[Group], dropped: Mapping[str, int]) -> Path:
        """Writes the file of a step's groups, and then removes all but the newest `keep` files, or none if `keep` is 0.
        `version`: version of the trainers' weights; `dropped`: number of groups dropped during the step, by reason."""
        about = describe(step, version, groups, dropped, self.origin)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / file_name(step)
        with _writing(path):
            save_groups(path, groups if self.origin.routes else without_routes(groups), asdict(about))
        if self.keep:
            for old in list(step_files(self.directory).values())[: -self.keep]:
                _remove(old)
        return path

    def write_trained(self, step: int, tokens: Sequence[TrainedTokens]) -> Path:
        """Writes the values that training computed for every token of `step`. The step's groups must already have been
        written."""
        path = self.directory / file_name(step)
        with _writing(path.with_suffix(SUFFIX)):
            return write_trained(path, tokens)


def describe(step: int, version: int, groups: Sequence[Group], dropped: Mapping[str, int], origin: Origin) -> About:
    """Returns the description of a step's groups. `version`: version of the trainers' weights; `dropped`: number of
    groups dropped during the step, by reason."""
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    rewards = []
    versions = []
    sampled_tokens = 0
    truncated = 0
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards.append(trajectory.reward)
        oldest = trajectory.oldest_version
        if oldest is not None:
            versions.append(oldest)
        sampled_tokens += trajectory.sampled_tokens
        if trajectory.status == "truncated":
            truncated += 1
    return About(
        step=step,
        version=version,
        groups=len(groups),
        trajectories=len(trajectories),
        sampled_tokens=sampled_tokens,
        reward=float(np.mean(rewards)) if rewards else None,
        oldest=min(versions, default=None),
        truncated=truncated,
        dropped=dict(dropped),
        origin=origin,
    )


def without_routes(groups: Sequence[Group]) -> list[Group]:
    """Returns copies of the groups in which `routed_experts` of every trajectory is None."""
    copies = []
    for group in groups:
        trajectories = [replace(trajectory, routed_experts=None) for trajectory in group.trajectories]
        copies.append(replace(group, trajectories=trajectories))
    return copies


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); free up disk space or set track.rollouts.every=0, "
            "then resume",
        ) from error


def _remove(path: Path) -> None:
    path.with_suffix(SUFFIX).unlink(missing_ok=True)
    path.unlink()


def file_name(step: int) -> str:
    """Returns the name of the file that contains a step's groups."""
    return f"step-{step:07d}.groups"


def step_files(directory: Path) -> dict[int, Path]:
    """Returns the files in `directory` that contain groups, by step, ascending; {} if the directory does not exist."""
    if not directory.is_dir():
        return {}
    files = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def read_step_about(path: Path) -> About:
    """Reads the description of a step from its file. Raises SlimxError naming the file if it is damaged or contains no
    description."""
    try:
        return msgspec.convert(read_about(path), About)
    except msgspec.ValidationError as error:
        raise SlimxError(
            f"{path}: the description of the step is invalid ({error}); use an intact copy of the file",
            code="data.header",
            about=str(path),
        ) from error


def read_step(path: Path) -> tuple[About, list[Group]]:
    """Reads the description and the groups of one step. Raises SlimxError naming the file if it is damaged."""
    return read_step_about(path), load_groups(path)


def described(steps: Sequence[int]) -> str:
    """Describes the available steps, in ascending order, for an error message."""
    if not steps:
        return "none"
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
