"""Advantages from per-token rewards: those of PPO with a critic's values, those of REINFORCE++ without.

All tensors are [B, L], one row per trajectory; `mask` is True at positions whose label was sampled and is trained on.
Positions are aligned as in `slimx.data.batch`: position t has read token t and predicts token t + 1, so the value at t
is that of the state before the prediction. Other positions, such as those of a tool's response, may be between trained
ones. Because the policy does not act there, the estimator treats consecutive trained positions as adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.algorithms.advantages.estimate import Estimator, StepData, by_rollout, rollout_rewards
from slimx.algorithms.advantages.group import mean, reward_of
from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import Gae, TokenRewards
from slimx.data.batch import TrainingRow
from slimx.data.records import Group


class TokenAdvantages(Estimator):
    """Advantage estimator of PPO and REINFORCE++. The trajectory's reward, or the reward minus the group's mean, is
    assigned to the last trained token."""

    def estimate(self, groups: Sequence[Group]) -> list[float]:
        above_mean = self.algorithm.advantages.kind == "reinforce_baseline"
        out: list[float] = []
        for group in groups:
            baseline = 0.0
            if above_mean and group.trajectories:
                baseline = mean(rollout_rewards(by_rollout(group)))
            out += [reward_of(trajectory) - baseline for trajectory in group.trajectories]
        return out

    def finish(self, step: StepData) -> dict[str, float]:
        scores = [float(row.advantages[0]) for row in step.rows]
        values = step.values if isinstance(self.algorithm.advantages, Gae) else None
        return assign_advantages(self.algorithm, step.rows, scores, values, step.reference)


def token_rewards(
    scores: torch.Tensor, mask: torch.Tensor, *, kl: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    """Returns the reward of each token: the trajectory's score (`scores` [B]) at its last trained token, minus
    `kl_coef` * `kl` [B, L] at all trained tokens (InstructGPT, arXiv:2203.02155, where kl is log policy - log
    reference). Other tokens, and rows without a trained token, have a reward of 0."""
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if kl is not None:
        rewards = torch.where(mask, -kl_coef * kl.to(scores.dtype), rewards)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (positions * mask).argmax(1, keepdim=True)
    return rewards.scatter_add(1, last, (scores * mask.any(1)).unsqueeze(1))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes advantages by generalized advantage estimation (GAE, arXiv:1506.02438). The result is the pair
    (advantages, returns), where returns = advantages + values; both are 0 at positions that are not trained on.

    For each trained position i of a row, delta_i = r_i + gamma V_{i+1} - V_i and A_i = delta_i + gamma lam A_{i+1}. V
    and A are 0 after the last trained position, because the trajectory ends there, even if it was truncated at the
    maximum length."""
    # Trained positions are moved to the front, in order; the values behind them are set to 0, which ends the recursion.
    order = torch.argsort(~mask, dim=1, stable=True)
    trained = mask.gather(1, order)
    reward = torch.where(trained, rewards.gather(1, order), 0)
    value = torch.where(trained, values.gather(1, order), 0)
    after = torch.nn.functional.pad(value[:, 1:], (0, 1))
    # One row per position, so that the recursion below reads contiguous memory.
    delta = torch.where(trained, reward + gamma * after - value, 0).T.contiguous()
    carry = torch.zeros_like(delta[0])
    for position in range(int(trained.sum(1).max()) - 1, -1, -1):
        carry = delta[position].add_(carry, alpha=gamma * lam)
    advantages = torch.zeros_like(values).scatter(1, order, torch.where(trained, delta.T, 0))
    return advantages, torch.where(mask, advantages + values, 0)


def whiten(advantages: torch.Tensor, mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Normalizes advantages to mean 0 and standard deviation 1 over all trained tokens of the batch; other tokens get
    0."""
    trained = advantages[mask]
    centered = trained - trained.mean()
    return torch.zeros_like(advantages).masked_scatter(mask, centered / (centered.square().mean() + eps).sqrt())


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Computes 1 - Var(returns - values) / Var(returns) over trained tokens. It is 1 for a perfect critic, 0 for a
    constant one, and NaN if all returns are equal."""
    targets = returns[mask]
    spread = targets.var(correction=0)
    return (1 - (targets - values[mask]).var(correction=0) / spread).item() if spread > 0 else float("nan")


def assign_advantages(
    algorithm: Algorithm,
    rows: Sequence[TrainingRow],
    scores: Sequence[float],
    values: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """Sets `advantages` of every row of a step, and with a critic also `values` and `returns`. Returns metrics of the
    full step.

    `scores`: score of each row's trajectory. `values`: the critic's values [n] of each row; None without a critic.
    `reference`: log-probs [n] of each row under the reference model; None if rewards have no KL penalty. The penalty
    uses the engine's log-probs as those of the policy, so it applies to the distribution that was sampled from.

    Without a critic, the advantage of a token is the discounted sum of the rewards from this token on (REINFORCE++,
    2501.03262). Advantages are whitened over all updates of the step; their metrics are computed before whitening."""
    mask = _padded([row.weight > 0 for row in rows]).bool()
    kl = None
    if reference is not None:
        estimate = ESTIMATORS[algorithm.kl_reward_estimator]
        kl = estimate(_padded([row.rollout_logprobs for row in rows]), _padded(reference))
    rewards = token_rewards(torch.tensor(scores, dtype=torch.float64), mask, kl=kl, kl_coef=algorithm.kl_reward_coef)
    value = torch.zeros(mask.shape, dtype=torch.float64) if values is None else _padded(values)
    estimator = algorithm.advantages.narrow(TokenRewards)
    lam = 1.0 if values is None else estimator.narrow(Gae).lam
    advantages, returns = gae(rewards, value, mask, gamma=estimator.gamma, lam=lam)
    metrics = {
        "return/mean": returns[mask].mean().item(),
        "advantage/mean": advantages[mask].mean().item(),
        "advantage/std": advantages[mask].std(correction=0).item(),
    }
    if kl is not None:
        metrics["kl/reward"] = kl[mask].mean().item()
    if values is not None:
        metrics["value/explained_variance"] = explained_variance(value, returns, mask)
        for row, row_values, row_returns in zip(rows, values, returns, strict=True):
            row.values = np.asarray(row_values, np.float32)
            row.returns = row_returns[: len(row)].numpy().astype(np.float32)
    if estimator.whiten:
        advantages = whiten(advantages, mask)
    for row, row_advantages in zip(rows, advantages, strict=True):
        row.advantages = row_advantages[: len(row)].numpy().astype(np.float32)
    return metrics


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Stacks arrays of different lengths into float64 [B, L], padded with zeros."""
    out = np.zeros((len(rows), max(map(len, rows))))
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(out)
