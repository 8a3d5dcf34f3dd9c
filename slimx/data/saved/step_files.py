"""The rollouts that a run trained on, a file per step: `RUN/rollouts/step-0000012.groups`, and beside it one of what
their training computed of each token (`slimx.data.saved.trained_tokens`).

A file is a line of JSON and the step's groups behind it, in the order in which they were trained, by
`slimx.data.saved.codec`.
Under `about` the line says what can be known without reading the groups: the fields of `About`. `slimx rollouts` shows
these files, `rollout.replay` trains on them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group
from slimx.data.saved.codec import encode, load_groups, read_about, save_groups
from slimx.data.saved.trained_tokens import SUFFIX, TrainedTokens, write_trained
from slimx.digest import fingerprint
from slimx.errors import SlimxError

DIRECTORY = "rollouts"
"""Their folder in a run directory."""
TOKENIZER = "tokenizer"
"""The folder of the tokenizer by which they are read."""
_NAME = re.compile(r"step-(\d{7,})\.groups")
_UNRELATED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config")
"""Keys of a config.json that differ between copies of one model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Everything that rollouts were made with and that training on them again must share."""

    model: dict[str, Any]
    """The model's config.json."""
    vocabulary: str
    """Digest of the tokenizer's tokens and their ids."""
    prompts_per_step: int
    group_size: int
    max_staleness: int
    routes: bool
    """True if the files keep the experts of each token."""
    policies: list[str] = field(default_factory=lambda: [ACTOR])
    """Names of the trained policies."""

    def differences(self, other: Origin) -> dict[str, str]:
        """Differences of `self`, of a file, from `other`, of a run that would train on it: a clause by what differs."""
        out = {}
        if keys := sorted(k for k in self.model.keys() | other.model.keys() if self.model.get(k) != other.model.get(k)):
            first = keys[0]
            out["config.json"] = (
                f"another model sampled it (config.json: {first} is {self.model.get(first)}, in model.path "
                f"{other.model.get(first)})"
            )
        elif self.vocabulary != other.vocabulary:
            out["vocabulary"] = (
                "another tokenizer made its tokens (model.path has the same model, but not the same vocabulary)"
            )
        for key in ("rollout.prompts_per_step", "rollout.group_size", "schedule.max_staleness"):
            there, here = (getattr(each, key.partition(".")[2]) for each in (self, other))
            if there != here:
                out[key] = f"it was made with {key}={there}, this run has {here}"
        if set(self.policies) != set(other.policies):
            there, here = (" and ".join(each.policies) for each in (self, other))
            out["policies"] = f"it has trajectories of the policies {there}, and this run trains {here}"
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """One step in a line."""

    step: int
    version: int
    """Weight version of the trainers when they trained it."""
    groups: int
    trajectories: int
    sampled_tokens: int
    reward: float | None
    """Mean of all trajectories; None where no reward is given."""
    oldest: int | None
    """Oldest weight version that sampled any token; None where nothing was sampled."""
    truncated: int
    """Trajectories."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups that were made meanwhile and are not here, by reason."""
    origin: Origin


def origin_of(config: Config, tokenizer: Any) -> Origin:
    """The origin of this run's rollouts."""
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
    """Writes the files of one run."""

    def __init__(self, directory: Path, origin: Origin, *, every: int, keep: int, resume_step: int):
        """`every`: steps between files, 0: none. `keep`: newest files that stay, 0: all. Files of `resume_step` and
        later steps, which the run trains anew, are removed."""
        self.directory, self.origin, self.every, self.keep = directory, origin, every, keep
        for step, path in step_files(directory).items():
            if step >= resume_step:
                _remove(path)

    def due(self, step: int) -> bool:
        """Returns True if step `step`, from 1, gets a file: the first one does."""
        return self.every > 0 and (step - 1) % self.every == 0

    def write(self, step: int, version: int, groups: Sequence[Group], dropped: Mapping[str, int]) -> Path:
        """Write one step's groups; afterwards files that are not kept are gone. `version`: see `About`."""
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
        """Write what was computed of every token of `step`, whose groups have been written."""
        path = self.directory / file_name(step)
        with _writing(path.with_suffix(SUFFIX)):
            return write_trained(path, tokens)


def describe(step: int, version: int, groups: Sequence[Group], dropped: Mapping[str, int], origin: Origin) -> About:
    """The description of a step's groups."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return About(
        step=step,
        version=version,
        groups=len(groups),
        trajectories=len(trajectories),
        sampled_tokens=sum(s.stop - s.start for t in trajectories for s in t.spans if s.source == "sampled"),
        reward=float(np.mean(rewards)) if rewards else None,
        oldest=min((t.oldest_version for t in trajectories if t.oldest_version is not None), default=None),
        truncated=sum(t.status == "truncated" for t in trajectories),
        dropped=dict(dropped),
        origin=origin,
    )


def without_routes(groups: Sequence[Group]) -> list[Group]:
    """The groups without the experts of each token."""
    return [
        replace(group, trajectories=[replace(each, routed_experts=None) for each in group.trajectories])
        for group in groups
    ]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); free space, or set track.rollouts.every=0, then resume",
        ) from error


def _remove(path: Path) -> None:
    path.with_suffix(SUFFIX).unlink(missing_ok=True)
    path.unlink()


def file_name(step: int) -> str:
    """The name of step `step`'s file."""
    return f"step-{step:07d}.groups"


def step_files(directory: Path) -> dict[int, Path]:
    """The files in `directory` by step, ascending; {} where there is no such directory."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    found = [(int(match[1]), directory / match[0]) for match in map(_NAME.fullmatch, names) if match]
    return dict(sorted(found))


def read_step_about(path: Path) -> About:
    """The header's description of a step. Raises SlimxError naming a file that is damaged or says nothing."""
    try:
        return msgspec.convert(read_about(path), About)
    except msgspec.ValidationError as error:
        raise SlimxError(
            f"{path}: does not say what slimx writes about a step ({error}); take another one",
            code="data.header",
            about=str(path),
        ) from error


def read_step(path: Path) -> tuple[About, list[Group]]:
    """One step. Raises SlimxError naming a damaged file."""
    return read_step_about(path), load_groups(path)
