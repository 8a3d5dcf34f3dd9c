"""Names and meanings of all metrics of a step. docs/metrics.md is generated from this table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slimx.errors import SlimxError


@dataclass(frozen=True)
class Metric:
    """Table entry for one metric, or for all metrics whose names differ only in a placeholder such as `{part}`."""

    name: str
    """Name of the metric, `section/name`; `{part}` stands for any text."""
    meaning: str

    @property
    def section(self) -> str:
        """Part of the name before the first slash."""
        return self.name.partition("/")[0]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the names of all metrics that this entry of the table describes."""
        pattern = ""
        for part in _PARTS.findall(self.name):
            pattern += ".+" if part[0] == "{" else re.escape(part)
        return re.compile(pattern)


_PARTS = re.compile(r"\{\w+\}|[^{]+")

METRICS = (
    Metric("reward/mean", "Mean reward of the trained trajectories."),
    Metric("reward/std", "Standard deviation of the rewards of the trained trajectories."),
    Metric("reward/groups_without_signal", "Fraction of groups whose trajectories all have the same reward."),
    Metric(
        "reward/part/{part}/mean", "Mean of the named part of the rewards, over the trajectories that have this part."
    ),
    Metric("reward/part/{part}/std", "Standard deviation of the named part of the rewards."),
    Metric("reward/part/{part}/count", "Number of trajectories that have this part of the reward."),
    Metric("source/{source}/reward", "Mean reward of the trajectories whose prompts come from this dataset."),
    Metric("source/{source}/mean_tokens", "Mean number of sampled tokens of the trajectories from this dataset."),
    Metric("source/{source}/truncated", "Fraction of the trajectories from this dataset that reached the token limit."),
    Metric("source/{source}/trajectories", "Number of trajectories from this dataset."),
    Metric("hook/{name}/mean", "Mean of the values that hooks logged with `ctx.log`, without NaN and infinities."),
    Metric("hook/{name}/min", "Smallest of the values that hooks logged."),
    Metric("hook/{name}/max", "Largest of the values that hooks logged."),
    Metric("hook/{name}/count", "Number of values that hooks logged, including NaN and infinities."),
    Metric("hook/{name}/nonfinite", "Number of logged values that are NaN or infinite; absent if there are none."),
    Metric("response/mean_tokens", "Mean number of sampled tokens of a trajectory."),
    Metric("response/max_tokens", "Largest number of sampled tokens of a trajectory."),
    Metric(
        "response/passed_mean_tokens",
        "Mean number of sampled tokens of trajectories whose reward reaches `eval.passing`.",
    ),
    Metric(
        "response/failed_mean_tokens",
        "Mean number of sampled tokens of trajectories whose reward is below `eval.passing`.",
    ),
    Metric(
        "response/completed_mean_tokens", "Mean number of sampled tokens of trajectories that the model ended itself."
    ),
    Metric("response/truncated", "Fraction of trajectories that reached the token limit."),
    Metric("rollout/turns_mean", "Mean number of model turns of a trajectory."),
    Metric("rollout/turns_max", "Largest number of model turns of a trajectory."),
    Metric(
        "rollout/regenerated",
        "Number of groups that were generated again because they became too stale for training.",
    ),
    Metric(
        "rollout/request_retries",
        "Number of requests to engines that were sent again since the start of the process.",
    ),
    Metric("dropped/total", "Number of groups that were dropped and not used for training."),
    Metric("dropped/{reason}", "Number of groups that were dropped for this reason."),
    Metric(
        "staleness/mean",
        "Mean staleness: trainer version minus the oldest version that sampled a token of the trajectory.",
    ),
    Metric("staleness/max", "Largest staleness of a trajectory."),
    Metric("staleness/mixed", "Fraction of trajectories that several versions sampled."),
    Metric(
        "eval/accuracy",
        "Mean reward of the answers to held-out prompts; for a reward model, the fraction of held-out pairs whose "
        "chosen answer scores higher.",
    ),
    Metric("eval/margin", "For a reward model: mean score of the chosen minus the rejected answers of held-out pairs."),
    Metric("eval/{set}/margin", "`eval/margin` of one named set of pairs."),
    Metric("eval/pass@{k}", "Estimated probability that at least one of k answers reaches `eval.passing`."),
    Metric("eval/failed", "Number of held-out prompts whose evaluation failed; their answers count with reward 0."),
    Metric("eval/begun", "1 if an evaluation of the step began during training (`eval.engines`)."),
    Metric("eval/lost", "1 if an evaluation during training ended without a result."),
    Metric("eval/{set}/accuracy", "`eval/accuracy` of one named set of prompts."),
    Metric("eval/{set}/pass@{k}", "`eval/pass@{k}` of one named set of prompts."),
    Metric("eval_reward/part/{part}/{measure}", "`reward/part/{part}/{measure}` of the answers to held-out prompts."),
    Metric("eval_hook/{name}/{measure}", "`hook/{name}/{measure}` of the answers to held-out prompts."),
    Metric("loss/policy", "Surrogate loss of the policy, without KL penalty and other added terms."),
    Metric("loss/sft", "Negative log-likelihood of demonstrations (supervised fine-tuning)."),
    Metric("loss/kl", "KL penalty in the loss."),
    Metric("loss/clip_fraction", "Fraction of trained tokens whose probability ratio the loss clips."),
    Metric("policy/entropy", "Mean entropy of the policy at trained tokens, in nats."),
    Metric("kl/reference", "KL divergence of the policy from the reference, mean over trained tokens."),
    Metric("kl/rollout", "KL divergence of the policy from the engine that sampled, mean over trained tokens."),
    Metric("kl/teacher", "KL divergence of the policy from the teacher, mean over trained tokens."),
    Metric(
        "kl/teacher_top",
        "KL divergence between policy and teacher over the teacher's most likely tokens, mean over trained tokens.",
    ),
    Metric("kl/reward", "KL penalty that is subtracted from token rewards, mean over trained tokens."),
    Metric("correction/weight", "Mean weight that the off-policy correction gives to trained tokens."),
    Metric("correction/outside", "Fraction of tokens whose weight is outside the bounds of the off-policy correction."),
    Metric("rejection/share", "Fraction of tokens that rejection removes from the loss."),
    Metric("opsm/share", "Fraction of tokens that are masked because their sequences are off-policy."),
    Metric("advantage/mean", "Mean advantage of trained tokens."),
    Metric("advantage/std", "Standard deviation of the advantages of trained tokens."),
    Metric("return/mean", "Mean return of trained tokens."),
    Metric(
        "covariance/{measure}",
        "Covariance of log-prob and advantage at trained tokens: its `mean` and `max`, and the fraction of tokens "
        "`selected` by their covariance.",
    ),
    Metric(
        "dpo/{measure}",
        "DPO: mean `loss` and `margin` of pairs, `accuracy` (fraction of pairs with a positive margin), and "
        "`groups_without_pair` (fraction of groups that give no pair).",
    ),
    Metric("preference/loss", "Bradley-Terry loss of a reward model, mean over pairs."),
    Metric(
        "preference/accuracy",
        "Fraction of trained pairs whose chosen answer scores higher; equal scores count as half.",
    ),
    Metric("preference/margin", "Mean score of the chosen minus the rejected answers of trained pairs."),
    Metric("value/loss", "Half the squared error of the critic's values against the returns."),
    Metric("value/mean", "Mean value that the critic predicts at trained tokens."),
    Metric("value/clip_fraction", "Fraction of values whose change the loss clips."),
    Metric("value/explained_variance", "Fraction of the variance of returns that the critic explains; at most 1."),
    Metric(
        "gap/mean",
        "Mean |log-prob of the trainer - log-prob of the engine| over tokens that the current version sampled.",
    ),
    Metric("gap/max", "Largest gap of a token that the current version sampled."),
    Metric("gap/tokens", "Number of tokens over which the gap is measured."),
    Metric("gap/tokens_above_1e-5", "Number of measured tokens with a gap above 1e-5."),
    Metric(
        "gap/tokens_other_routes",
        "Number of tokens with a gap above 1e-5 at or before which trainer and engine used other experts.",
    ),
    Metric(
        "gap/tokens_unexplained",
        "Number of tokens with a gap above 1e-5 although trainer and engine used the same experts.",
    ),
    Metric(
        "gap/tokens_without_routes", "Number of tokens with a gap above 1e-5 whose experts the engine did not return."
    ),
    Metric(
        "mismatch/mean", "Mean |log-prob of the policy - log-prob of the engine| over trained tokens of all versions."
    ),
    Metric("mismatch/max", "Largest |log-prob of the policy - log-prob of the engine| of a trained token."),
    Metric("mismatch/k3", "KL(engine || policy), by the k3 estimator."),
    Metric("mismatch/ratio", "Mean ratio of the probabilities of trained tokens, policy / engine."),
    Metric(
        "mismatch/ess",
        "Effective sample size of importance weighting as a fraction of the trained tokens; 1 if policy and engine "
        "agree.",
    ),
    Metric("routes/differing", "Number of measured tokens for which engine and trainer used different experts."),
    Metric("router/imbalance", "Load of the busiest expert divided by the mean load, mean over MoE layers."),
    Metric("router/imbalance_max", "Largest `router/imbalance/{layer}` of all MoE layers."),
    Metric(
        "router/imbalance/{layer}",
        "Load of the busiest expert divided by the mean load in one layer; `mtpN` for layers of multi-token "
        "prediction.",
    ),
    Metric(
        "router/{term}",
        "An auxiliary loss of the router without its coefficient, such as `z_loss`, mean over MoE layers.",
    ),
    Metric("optim/grad_norm", "Norm of the gradient before clipping."),
    Metric("optim/lr", "Learning rate."),
    Metric("optim/skipped", "Number of optimizer steps skipped because the gradient was not finite."),
    Metric("optim/zero_gradient", "Number of optimizer steps skipped because the gradient was 0 everywhere."),
    Metric(
        "optim/steps_without_signal",
        "Number of consecutive steps, including this one, in which all rollouts of each group had the same reward "
        "or the gradient was 0.",
    ),
    Metric("critic/{measure}", "`grad_norm`, `lr`, `skipped` and `zero_gradient` of the critic."),
    Metric("batch/microbatches", "Number of micro-batches that each data-parallel rank processes in the step."),
    Metric("batch/padding", "Fraction of positions in micro-batches that are padding."),
    Metric("batch/imbalance", "Work of the busiest data-parallel rank divided by the mean work, minus 1."),
    Metric("publish/{stage}_seconds", "Seconds of one stage of the publication; `total` for all stages."),
    Metric("publish/mib", "MiB published to each engine."),
    Metric("publish/wire_mib", "MiB sent to all engines together (`publish.transport: nixl`)."),
    Metric("publish/tensors_verified", "Number of tensors that every engine verified by checksum."),
    Metric("publish/engines_verified", "Number of engines that verified the version."),
    Metric("engines/serving", "Number of engines that serve."),
    Metric("engines/quarantined", "Number of engines that do not serve until they verify a version."),
    Metric("engines/lost", "Number of lost engines since the start of the process."),
    Metric(
        "recovery/trainers",
        "Number of times that lost trainer ranks were replaced since the start of the process.",
    ),
    Metric("recovery/seconds", "Seconds of this step in which trainer ranks were being replaced."),
    Metric("recovery/trained_again", "Number of steps that new trainer ranks repeated since the start of the process."),
    Metric(
        "recovery/mirrored_step",
        "Newest step for which the states of all ranks are mirrored (`recovery.mirror_every`).",
    ),
    Metric(
        "recovery/data_parallel",
        "Number of data-parallel ranks; fewer than configured after `recovery.shrink_after`.",
    ),
    Metric(
        "recovery/from_mirrors",
        "Number of times that new trainer ranks loaded their state from mirrors since the start of the process.",
    ),
    Metric(
        "recovery/kept_steps",
        "Number of steps whose batches the driver keeps, so that new trainer ranks can repeat them.",
    ),
    Metric("recovery/kept_mib", "Size of the batches that the driver keeps, in MiB."),
    Metric("engines/restarted", "Number of restarts of engines since the start of the process."),
    Metric("engines/router_restarts", "Number of restarts of the router since the start of the process."),
    Metric("engines/outage_seconds", "Seconds without any serving engine since the start of the process."),
    Metric("engines/{group}/{measure}", "`engines/{measure}` of the engines in a frozen group."),
    Metric(
        "policy/{policy}/{metric}",
        "The metric `{metric}` of a trained policy other than the actor (section `policies`).",
    ),
    Metric("perf/tokens_per_second", "Trained positions, including those of prompts, per second of the step."),
    Metric("memory/{phase}_peak_mib", "Peak memory of the fullest trainer rank in this phase, in MiB."),
    Metric("time/step", "Seconds of the whole step."),
    Metric("time/{phase}", "Seconds of one phase of the step."),
)

LEAVES = ("mean", "min", "max", "count", "nonfinite")
"""Last components of the names of metrics that slimx computes from values logged by hooks. Hooks must not log names
that end in one of these components."""
_FORM = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


@lru_cache(4096)  # cached, because hooks log the same names in every rollout
def find(name: str) -> Metric | None:
    """Returns the table entry that describes metric `name`; None if there is none. An entry without a placeholder such
    as `{part}` takes precedence over entries with one."""
    return next((metric for metric in _EXACT_FIRST if metric.pattern.fullmatch(name)), None)


_EXACT_FIRST = sorted(METRICS, key=lambda metric: metric.name.count("{"))


def check_hook_name(name: str) -> None:
    """Raises SlimxError if a hook must not log a value as `name`, because the name is malformed or belongs to one of
    slimx's metrics."""
    if not isinstance(name, str) or not _FORM.fullmatch(name):
        raise SlimxError(
            f"a hook called ctx.log with the invalid name {name!r}; use letters, digits, `_`, `.` and `-`, in "
            "parts separated by single slashes",
            code="metrics.name",
            about=str(name),
        )
    if find(name) is not None:
        raise SlimxError(
            f"a hook called ctx.log with the name {name}, which is a metric of slimx (docs/metrics.md); use "
            "another name",
            code="metrics.own_name",
            about=name,
        )
    if name.rpartition("/")[2] in LEAVES:
        raise SlimxError(
            f"a hook called ctx.log with the name {name}, but slimx appends mean, min, max, count and nonfinite to "
            "names itself; remove the last part of the name",
            code="metrics.name",
            about=name,
        )
