"""Names of a step's metrics with their meanings; docs/metrics.md is generated from this table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slimx.errors import SlimxError


@dataclass(frozen=True)
class Metric:
    """A metric, or all metrics whose names differ only in the parts in braces."""

    name: str
    """`section/name`; `{part}` stands for any text."""
    meaning: str

    @property
    def section(self) -> str:
        """Part of the name before the first slash."""
        return self.name.partition("/")[0]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the names that this entry describes."""
        pattern = ""
        for part in _PARTS.findall(self.name):
            pattern += ".+" if part[0] == "{" else re.escape(part)
        return re.compile(pattern)


_PARTS = re.compile(r"\{\w+\}|[^{]+")

METRICS = (
    Metric("reward/mean", "Mean reward of the trained trajectories."),
    Metric("reward/std", "Standard deviation of these rewards."),
    Metric("reward/groups_without_signal", "Share of groups whose trajectories all have the same reward."),
    Metric("reward/part/{part}/mean", "Mean of one part of the rewards, over the trajectories that have it."),
    Metric("reward/part/{part}/std", "Standard deviation of that part."),
    Metric("reward/part/{part}/count", "Trajectories that have that part."),
    Metric("source/{source}/reward", "Mean reward of the trajectories whose prompt comes from this data set."),
    Metric("source/{source}/mean_tokens", "Their mean number of sampled tokens."),
    Metric("source/{source}/truncated", "Share of them that reached the limit of tokens."),
    Metric("source/{source}/trajectories", "Their number."),
    Metric("hook/{name}/mean", "Mean of the values that hooks logged by `ctx.log`; NaN and infinities are left out."),
    Metric("hook/{name}/min", "Smallest of these values."),
    Metric("hook/{name}/max", "Largest of these values."),
    Metric("hook/{name}/count", "Values that were logged, those that are not finite included."),
    Metric("hook/{name}/nonfinite", "Values that were NaN or infinite; only where there are any."),
    Metric("response/mean_tokens", "Mean number of sampled tokens of a trajectory."),
    Metric("response/max_tokens", "Largest number of sampled tokens."),
    Metric("response/passed_mean_tokens", "Mean number of tokens where the reward reaches `eval.passing`."),
    Metric("response/failed_mean_tokens", "Mean number of tokens where the reward is lower."),
    Metric("response/completed_mean_tokens", "Mean number of tokens of responses that the model ended itself."),
    Metric("response/truncated", "Share of trajectories that reached the limit of tokens."),
    Metric("rollout/turns_mean", "Mean number of the model's turns in a trajectory."),
    Metric("rollout/turns_max", "Largest number of turns."),
    Metric("rollout/regenerated", "Groups generated anew because no step could train them in time."),
    Metric("rollout/request_retries", "Requests to engines that were sent again, since the start of the process."),
    Metric("dropped/total", "Groups that were dropped."),
    Metric("dropped/{reason}", "Groups that were dropped for this reason."),
    Metric("staleness/mean", "Trainer version minus the oldest version that sampled a trajectory, mean."),
    Metric("staleness/max", "The largest such difference."),
    Metric("staleness/mixed", "Share of trajectories that several versions sampled."),
    Metric(
        "eval/accuracy",
        "Mean reward of the held-out answers; of a reward model the share of pairs whose chosen answer scores higher.",
    ),
    Metric("eval/margin", "Of a reward model: mean difference of the scores of held-out pairs."),
    Metric("eval/{set}/margin", "The same of one named set."),
    Metric("eval/pass@{k}", "Chance that one of k answers reaches `eval.passing`."),
    Metric("eval/failed", "Held-out prompts whose evaluation failed; each counts as 0."),
    Metric("eval/{set}/accuracy", "The same of one named set."),
    Metric("eval/{set}/pass@{k}", "The same of one named set."),
    Metric("eval_reward/part/{part}/{measure}", "As `reward/part`, of the held-out answers."),
    Metric("eval_hook/{name}/{measure}", "As `hook`, of the held-out answers."),
    Metric("loss/policy", "Policy loss."),
    Metric("loss/sft", "Negative log-likelihood of demonstrations."),
    Metric("loss/kl", "KL penalty in the loss."),
    Metric("loss/clip_fraction", "Share of tokens whose ratio the loss clips."),
    Metric("policy/entropy", "Mean entropy of the policy at trained tokens, nats."),
    Metric("kl/reference", "KL to the reference, mean per token."),
    Metric("kl/rollout", "KL between policy and the engine that sampled, mean per token."),
    Metric("kl/teacher", "KL to the teacher, mean per token."),
    Metric("kl/teacher_top", "KL with the teacher over its likeliest tokens, mean per token."),
    Metric("kl/reward", "KL that is subtracted from token rewards, mean."),
    Metric("correction/weight", "Mean weight of the off-policy correction."),
    Metric("correction/outside", "Share of tokens outside the correction's bounds."),
    Metric("rejection/share", "Share of tokens that rejection takes out of the loss."),
    Metric("opsm/share", "Share of tokens masked as off-policy sequences."),
    Metric("advantage/mean", "Mean advantage of trained tokens."),
    Metric("advantage/std", "Standard deviation of these advantages."),
    Metric("return/mean", "Mean return of trained tokens."),
    Metric("covariance/{measure}", "Covariance of log-prob and advantage: `mean`, `max`, and the share `selected`."),
    Metric("dpo/{measure}", "DPO: `loss`, `margin`, `accuracy`, `groups_without_pair`."),
    Metric("preference/loss", "Bradley-Terry loss of a reward model."),
    Metric("preference/accuracy", "Share of pairs whose chosen answer scores higher; one that scores alike is half."),
    Metric("preference/margin", "Mean score of the chosen answers minus that of the rejected ones."),
    Metric("value/loss", "Loss of the critic."),
    Metric("value/mean", "Mean value that the critic predicts."),
    Metric("value/clip_fraction", "Share of values whose change the loss clips."),
    Metric("value/explained_variance", "Variance of the returns that the critic explains; 1 is all."),
    Metric("gap/mean", "Mean |log-prob of the trainer - of the engine| over tokens of the present version."),
    Metric("gap/max", "Largest such gap."),
    Metric("gap/tokens", "Tokens over which it is measured."),
    Metric("gap/tokens_above_1e-5", "Tokens with a larger gap than 1e-5."),
    Metric("gap/tokens_other_routes", "Tokens among these that another set of experts explains."),
    Metric("gap/tokens_unexplained", "Tokens among these that no route explains."),
    Metric("gap/tokens_without_routes", "Tokens among these whose experts the engine did not return."),
    Metric("mismatch/mean", "Mean |policy - engine| in log-probs over trained tokens of whatever version."),
    Metric("mismatch/max", "Largest such difference."),
    Metric("mismatch/k3", "KL(engine || policy), estimator k3."),
    Metric("mismatch/ratio", "Mean ratio of probabilities, policy / engine."),
    Metric("mismatch/ess", "Effective sample size as a share; 1 where both agree."),
    Metric("routes/differing", "Tokens at which the engine chose other experts than the trainer would."),
    Metric("router/imbalance", "Load of the fullest expert over the mean load, mean over layers."),
    Metric("router/imbalance_max", "The largest of a layer."),
    Metric("router/imbalance/{layer}", "That of one layer; `mtpN` for layers of multi-token prediction."),
    Metric("router/{term}", "A term of the router's loss without its coefficient, such as `z_loss`."),
    Metric("optim/grad_norm", "Norm of the gradient before clipping."),
    Metric("optim/lr", "Learning rate."),
    Metric("optim/skipped", "Optimizer steps skipped because the gradient was not finite."),
    Metric("optim/zero_gradient", "Optimizer steps left out because the gradient was 0 everywhere."),
    Metric(
        "optim/steps_without_signal",
        "Steps in a row, this one included, in which all rollouts of each group had the same reward or the gradient "
        "was 0.",
    ),
    Metric("critic/{measure}", "`grad_norm`, `lr`, `skipped` and `zero_gradient` of the critic."),
    Metric("batch/microbatches", "Micro-batches of a rank."),
    Metric("batch/padding", "Share of positions that are padding."),
    Metric("batch/imbalance", "Work of the busiest rank over the mean, minus 1."),
    Metric("publish/{stage}_seconds", "Seconds of one stage of the publication; `total`: all."),
    Metric("publish/mib", "MiB published to each engine."),
    Metric("publish/wire_mib", "MiB that travelled to all engines together (`publish.transport: nixl`)."),
    Metric("publish/tensors_verified", "Tensors proven equal in every engine."),
    Metric("publish/engines_verified", "Engines that proved the version."),
    Metric("engines/serving", "Engines that take part."),
    Metric("engines/quarantined", "Engines kept out until they prove a version."),
    Metric("engines/lost", "Engines lost since the start."),
    Metric("recovery/trainers", "Times that lost trainers were replaced since the start (`recovery.trainers`)."),
    Metric("recovery/seconds", "Seconds of this step without trainers."),
    Metric("recovery/trained_again", "Steps that new trainers trained again since the start."),
    Metric("recovery/mirrored_step", "Newest step of which all ranks' states are mirrored (`recovery.mirror_every`)."),
    Metric("recovery/data_parallel", "Data-parallel ranks now; fewer than configured after `recovery.shrink_after`."),
    Metric("recovery/from_mirrors", "Times that new trainers took their state from mirrors since the start."),
    Metric("recovery/kept_steps", "Steps whose batches the driver keeps, to train them again in new trainers."),
    Metric("recovery/kept_mib", "MiB of these batches."),
    Metric("engines/restarted", "Engines started again since the start."),
    Metric("engines/router_restarts", "Restarts of the router since the start."),
    Metric("engines/outage_seconds", "Seconds without any engine since the start."),
    Metric("engines/{group}/{measure}", "The same of a frozen group."),
    Metric("policy/{policy}/{metric}", "The metric `{metric}` of a further trained policy (section `policies`)."),
    Metric("perf/tokens_per_second", "Trained positions, prompts included, per second of the step."),
    Metric("memory/{phase}_peak_mib", "Highest memory of a trainer rank in this phase, MiB."),
    Metric("time/step", "Seconds of the whole step."),
    Metric("time/{phase}", "Seconds of one phase of the step."),
)

LEAVES = ("mean", "min", "max", "count", "nonfinite")
"""Last parts of the metrics derived from hooks' values; the name that a hook logs may not end in one."""
_FORM = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


@lru_cache(4096)  # hooks log the same names in every rollout
def find(name: str) -> Metric | None:
    """Returns the entry that describes a metric; one without braces takes precedence."""
    return next((metric for metric in _EXACT_FIRST if metric.pattern.fullmatch(name)), None)


_EXACT_FIRST = sorted(METRICS, key=lambda metric: metric.name.count("{"))


def check_hook_name(name: str) -> None:
    """Raises SlimxError for a name that hooks may not log: a malformed one, or a name of a slimx metric."""
    if not isinstance(name, str) or not _FORM.fullmatch(name):
        raise SlimxError(
            f"ctx.log got the name {name!r}; use letters, digits and _ . - in parts separated by single slashes",
            code="metrics.name",
            about=str(name),
        )
    if find(name) is not None:
        raise SlimxError(
            f"ctx.log got the name {name}, which is a metric of slimx (docs/metrics.md); use another name",
            code="metrics.own_name",
            about=name,
        )
    if name.rpartition("/")[2] in LEAVES:
        raise SlimxError(
            f"ctx.log got the name {name}, but slimx adds mean, min, max, count and nonfinite to names; leave the last "
            "part out",
            code="metrics.name",
            about=name,
        )
