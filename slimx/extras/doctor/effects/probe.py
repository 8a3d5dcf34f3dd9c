"""A small synthetic batch of rollouts that contains everything a loss can react to, and the gradient that the
configured loss has on it. `slimx doctor --effects` is based on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slimx.algorithms.advantages.estimate import StepData, all_advantages, finish_advantages
from slimx.algorithms.inputs import LossInputs, TopLogprobs
from slimx.algorithms.losses.objective import make_loss
from slimx.config.schema import Config
from slimx.data.batch import TrainingRow, make_rows
from slimx.data.columns import LOSS_COLUMNS
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt, Span, Trajectory, Turn
from slimx.errors import SlimxError, raised
from slimx.extras.token_level.value_loss import ValueInputs, value_loss

PROMPTS = 6
DRIFT = 0.4
"""Standard deviation of the change in log-probs between two versions of the weights, for most tokens."""
GAP = 1e-3
"""Standard deviation of the difference between the log-probs of trainer and engine with equal weights, for most
tokens."""
OUTLIER = 2.0
"""Standard deviation of the difference between the log-probs of trainer and engine for the fraction `OUTLIERS` of
tokens. These represent the tokens that trainer and engine route to different experts."""
OUTLIERS = 0.15
"""Fraction of tokens whose log-probs differ by `OUTLIER` instead of `GAP`. The fraction is exaggerated, so that every
sensible bound takes effect."""


TOP = 3
"""Number of most likely tokens for which the synthetic teacher gives log-probs; one more logit stands for all other
tokens."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Synthetic batch for computing gradients with one configuration. Log-probs are float64, of shape [n] for each
    trajectory."""

    groups: list[Group]
    begin: list[np.ndarray]
    """Log-probs under the trainer's weights at the start of the step."""
    now: list[np.ndarray]
    """Log-probs under the trainer's weights at the last update of the step."""
    reference: list[np.ndarray]
    teacher: list[np.ndarray]
    entropy: list[np.ndarray]
    values: list[np.ndarray]
    """Values that a critic predicts at the start of the step."""
    values_now: list[np.ndarray]


def make_probe(config: Config) -> Probe:
    """Returns a synthetic batch: rollouts of `PROMPTS` prompts in groups of the configured size (at most 4), with two
    turns each and different rewards, reward parts and states.

    With a single update per step, the log-probs at the last update equal those at the start of the step. With
    max_staleness 0, the engine's log-probs differ from those at the start of the step only by the numerical gap."""
    random = np.random.default_rng(0)
    moved = config.schedule.updates_per_step > 1
    stale = config.schedule.max_staleness > 0
    engine_difference = DRIFT if stale else GAP
    groups: list[Group] = []
    names = ("begin", "now", "reference", "teacher", "entropy", "values", "new")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number in range(PROMPTS):
        trajectories = []
        for index in range(min(config.rollout.group_size, 4)):
            length = int(random.integers(8, 14))
            begin = -3 * random.random(length - 1)
            values = random.normal(size=length - 1)
            parts["begin"].append(begin)
            parts["now"].append(begin + moved * _difference(random, length - 1, DRIFT))
            parts["reference"].append(begin + _difference(random, length - 1, DRIFT))
            parts["teacher"].append(begin + _difference(random, length - 1, DRIFT))
            parts["entropy"].append(random.random(length - 1))
            parts["values"].append(values)
            parts["new"].append(values + moved * random.normal(size=length - 1))
            sampled = begin + _difference(random, length - 1, engine_difference)
            trajectories.append(_trajectory(number, index, sampled, random, newest=int(stale)))
        group = Group(id=f"{number}", prompt=Prompt(id=f"{number}", token_ids=[1]), trajectories=trajectories)
        group.baseline = float(random.normal())
        groups.append(group)
    return Probe(groups, values_now=parts.pop("new"), **parts)


def policy_gradient(config: Config, probe: Probe, *, without_advantages: bool = False) -> np.ndarray:
    """Returns the gradient of the configured loss, float64 [(3 + TOP) N], with respect to all log-probs and entropies
    of the synthetic batch and to the logits of `TOP` + 1 tokens at each of its positions. `without_advantages`: include
    only the loss terms that do not use advantages."""
    algorithm = config.algorithm
    rows = _rows(config, probe)
    _finish(config, probe, rows)
    if without_advantages:
        for row in rows:
            row.advantages = np.zeros_like(row.advantages)

    logprobs = _joined(probe.now).requires_grad_()
    entropy = _joined(probe.entropy).requires_grad_()
    columns = _columns(rows)
    if algorithm.taught:
        columns["teacher_logprobs"] = _joined(probe.teacher)
    rollout = columns["rollout_logprobs"]
    lengths = torch.tensor([len(row) for row in rows])
    row_index = torch.repeat_interleave(torch.arange(len(rows)), lengths)

    random = np.random.default_rng(1)
    logits = torch.from_numpy(random.normal(size=(len(rollout), TOP + 1))).requires_grad_()
    teacher_logits = torch.from_numpy(random.normal(size=(len(rollout), TOP + 1)))
    policy = logits.log_softmax(-1)
    teacher = teacher_logits.log_softmax(-1)[:, :TOP]

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=values.dtype).index_add_(0, row_index, values.detach())[row_index]

    old_logprobs = rollout
    if algorithm.old_logprobs == "recompute":
        old_logprobs = _joined(probe.begin)
    reference_logprobs = None
    if algorithm.reference:
        reference_logprobs = _joined(probe.reference)
    loss, _ = make_loss(algorithm)(
        LossInputs(
            **columns,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            top=TopLogprobs(policy[:, :TOP], policy[:, TOP], teacher),
            entropy=entropy,
            sequence_sum=sequence_sum,
        )
    )
    leaves = (logprobs, entropy, logits)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    parts = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        parts.append(gradient.flatten())
    return torch.cat(parts).numpy()


def try_hooks(config: Config) -> None:
    """Calls the user's advantage and loss hooks, if there are any, on a synthetic batch. Raises SlimxError, naming the
    hook's configuration key, if a hook raises an error or returns a wrong value."""
    algorithm = config.algorithm
    hooks = [f"algorithm.{key}={getattr(algorithm, key)}" for key in algorithm.hooks]
    if not hooks:
        return
    try:
        policy_gradient(config, make_probe(config))
    except SlimxError:
        raise
    except Exception as error:
        raise SlimxError(
            f"{' or '.join(hooks)} raised {raised(error)} when called with synthetic rollouts; to find the cause, call "
            "the hook with a batch from slimx.extras.doctor.effects.probe.make_probe",
            code="algorithm.hook",
            about=" or ".join(hooks),
        ) from error


def value_gradient(config: Config, probe: Probe) -> np.ndarray:
    """Returns the gradient of the critic's loss with respect to all values at the last update of the step, float64
    [N]."""
    assert config.critic is not None
    rows = _rows(config, probe)
    _finish(config, probe, rows)
    now = _joined(probe.values_now).requires_grad_()
    loss, _ = value_loss(ValueInputs(predicted=now, **_columns(rows)), clip=config.critic.value_clip)
    return torch.autograd.grad(loss, now)[0].numpy()


def _difference(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    outliers = random.random(count) < OUTLIERS
    return np.where(outliers, OUTLIER, deviation) * random.normal(size=count)


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).double()


def _columns(rows: Sequence[TrainingRow]) -> dict[str, torch.Tensor]:
    """Returns the fields of `LossColumns` that `rows` contain, each concatenated over the rows, float64."""
    columns = {}
    for name in LOSS_COLUMNS:
        if getattr(rows[0], name) is not None:
            columns[name] = _joined([getattr(row, name) for row in rows])
    return columns


def _rows(config: Config, probe: Probe) -> list[TrainingRow]:
    groups = probe.groups
    if config.algorithm.mask_stale_tokens:
        groups = [group.newest_only() for group in groups]
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    weights = loss_weights(trajectories, config.algorithm.aggregation, length=config.rollout.sampling.max_new_tokens)
    return make_rows(trajectories, all_advantages(config.algorithm, groups), weights)


def _finish(config: Config, probe: Probe, rows: list[TrainingRow]) -> None:
    step = StepData(
        groups=probe.groups,
        updates=[rows],
        policy=probe.begin,
        reference=probe.reference,
        values=probe.values,
        seed=(0, 0),
    )
    finish_advantages(config.algorithm, step)


def _trajectory(number: int, index: int, sampled: np.ndarray, random: np.random.Generator, newest: int) -> Trajectory:
    """Returns a trajectory of two prompt tokens and two turns with a tool response between them; the second turn was
    sampled by version `newest`. `sampled`: the engine's log-probs, [L-1]."""
    length = len(sampled) + 1
    middle = length // 2
    spans = [
        Span(start=0, stop=2, source="prompt"),
        Span(start=2, stop=middle, source="sampled", turn=0, version=0),
        Span(start=middle, stop=middle + 1, source="inserted", turn=1),
        Span(start=middle + 1, stop=length, source="sampled", turn=1, version=newest),
    ]
    mask = np.zeros(length, np.uint8)
    for span in spans:
        mask[span.start : span.stop] = span.source == "sampled"
    parts = {name: float(random.normal()) for name in ("first", "second")}
    return Trajectory(
        id=f"{number}/{index}",
        rollout_id=f"{number}/{index}",
        group_id=f"{number}",
        index=index,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.concatenate([[np.nan], sampled]).astype(np.float32),
        spans=spans,
        turns=[Turn(reward=float(random.normal()), state_key=key) for key in ("start", f"state {index % 2}")],
        reward=sum(parts.values()),
        reward_parts=parts,
    )
