"""Effects of the configured loss terms: the gradient of a small synthetic batch, with and without each term.

A coefficient that contributes nothing causes no error, so the mistake may only be noticed after a whole run. The
configuration refuses most such cases; this module finds combinations, such as a clip around a ratio that is always
1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimx.config.rule import broken, refuse, rules_in
from slimx.config.schema import Config
from slimx.config.sections.algorithm import NEEDS, Algorithm, Correction, Rejection
from slimx.config.sections.general import Schedule
from slimx.config.sections.objectives import Clip, read_objective
from slimx.extras.doctor.effects.probe import Probe, make_probe, policy_gradient, value_gradient
from slimx.extras.doctor.effects.router_probe import RouterSizes, router_gradient
from slimx.models.families import configured_model
from slimx.rules import trainer as trainer_rules

EXACT = 1e-12
"""Relative size below which a difference between two fp64 gradients is considered rounding error."""


SELECTED = 0.2
"""Minimum fraction of the synthetic batch's tokens that clip_cov and kl_cov select. With the default fraction they
would select only a single token of such a small batch."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Measured effect of one configured loss term."""

    key: str
    value: Any
    share: float
    """Relative change in the gradient that the term causes: |with - without| / max(|with|, |without|)."""
    chosen: bool
    """True if the configuration sets the term's value, False if the value is a default."""
    reason: str | None = None
    """Reason why the term has no effect; None if it has an effect."""


@dataclass(frozen=True, slots=True)
class Term:
    """Loss term: a key of section `algorithm`, or a parameter of its loss or advantages, with the neutral value that
    disables the term."""

    key: str
    neutral: Any
    reason: Callable[[Config], str | None] = lambda config: None


def _ratio_is_one(config: Config) -> str | None:
    if config.algorithm.old_logprobs == "recompute" and config.schedule.updates_per_step == 1:
        return (
            "with algorithm.old_logprobs=recompute and schedule.updates_per_step=1 policy and old policy have the "
            "same weights, so the ratio is 1 at every token; set schedule.updates_per_step above 1, or "
            "algorithm.old_logprobs=rollout"
        )
    return None


def _values_are_old(schedule: Schedule) -> str | None:
    if schedule.updates_per_step == 1:
        return (
            "in a step's only update (schedule.updates_per_step=1) the values equal the old ones, so nothing is clipped"
        )
    return None


def _nothing_compared(config: Config) -> str | None:
    if config.rollout.group_size == 1 and config.algorithm.group_relative:
        return "rollout.group_size is 1, and a single rollout in a group has the advantage 0"
    return None


FAR = 1e9

TERMS = (
    Term("advantages.normalize_std", False),
    Term("advantages.weights", {}),
    Term("advantages.step_coef", 0.0),
    Term("advantages.gamma", 1.0),
    Term("advantages.lam", 1.0),
    Term("advantages.whiten", False),
    Term("advantages.beta", FAR),
    Term("loss.low", 1.0, _ratio_is_one),
    Term("loss.high", FAR, _ratio_is_one),
    Term("loss.dual", None, _ratio_is_one),
    Term("loss.tau_positive", FAR, _ratio_is_one),
    Term("loss.tau_negative", FAR, _ratio_is_one),
    Term("loss.share", 0.0, _ratio_is_one),
    Term("aggregation", "token"),
    Term("kl_coef", 0.0),
    Term("kl_estimator", "k2"),
    Term("kl_unbiased", False, _ratio_is_one),
    Term("kl_reward_coef", 0.0),
    Term("entropy_coef", 0.0),
    Term("teacher_coef", 0.0),
    Term("teacher_kl_coef", 0.0),
    Term("teacher_kl", "forward"),
    Term("old_logprobs", "rollout"),
    Term("correction", Correction()),
    Term("rejection", Rejection()),
    Term("opsm_delta", None),
    Term("mask_stale_tokens", False),
)
"""Loss terms, in the order of the configuration's keys. Keys that have no effect with an algorithm are refused by
`slimx.config.sections.algorithm.NEEDS` and skipped here."""


ROUTER_TERMS = ("aux_loss_coef", "z_loss_coef")
"""Keys of `trainer.moe` that add terms to the loss."""


def effects(config: Config) -> list[Effect]:
    """Returns the effect of every term of the configured loss on the gradient of the synthetic batch.

    Needs neither GPU nor engine. Needs the model's config.json only if router loss terms are configured; it then raises
    SlimxError if the file is missing or the model has no routers."""
    probe, algorithm = make_probe(config), config.algorithm
    share = _value(algorithm, "loss.share")
    if share is not None:
        algorithm = _changed(algorithm, "loss.share", max(share, SELECTED))
        config = config.model_copy(update={"algorithm": algorithm})
    return [*_policy_effects(config, probe), *_value_effects(config, probe), *_router_effects(config, probe)]


def _policy_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    algorithm = config.algorithm
    if algorithm.scores:
        return  # a reward model's loss needs pairs, which the synthetic batch lacks
    full = policy_gradient(config, probe)
    if algorithm.loss.kind == "sft" or "loss" in algorithm.hooks:
        share = _share(full, np.zeros_like(full))
        yield _effect("algorithm.loss", algorithm.loss.kind, share, True, "its gradient is 0")
    if algorithm.loss.kind != "sft" and algorithm.advantages.kind != "none":
        share = _share(full, policy_gradient(config, probe, without_advantages=True))
        reason = _nothing_compared(config) or "every advantage of the synthetic batch is 0"
        yield _effect("algorithm.advantages", algorithm.advantages.kind, share, True, reason)
    if algorithm.loss.kind == "sft":
        return
    for term in TERMS:
        value = _value(algorithm, term.key)
        if value in (None, term.neutral) or not _belongs(algorithm, term.key):
            continue
        other = config.model_copy(update={"algorithm": _without(algorithm, term)})
        share = _share(full, policy_gradient(other, probe))
        reason = term.reason(config) or "the gradient of the synthetic batch is the same without it"
        yield _effect(f"algorithm.{term.key}", _shown(value), share, value != _default(algorithm, term.key), reason)


def _effect(key: str, value: Any, share: float, chosen: bool, reason: str | None) -> Effect:
    """Returns the Effect of a loss term. `reason`: why the term might have no effect; ignored if `share` is not 0."""
    return Effect(key, value, share, chosen, None if share else reason)


def _value_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    if config.critic is None or not config.critic.value_clip:
        return
    critic = config.critic.model_copy(update={"value_clip": 0.0})
    share = _share(value_gradient(config, probe), value_gradient(config.model_copy(update={"critic": critic}), probe))
    reason = _values_are_old(config.schedule)
    chosen = config.critic.value_clip != type(config.critic).model_fields["value_clip"].default
    yield _effect("critic.value_clip", config.critic.value_clip, share, chosen, reason)


def _router_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    """Yields, for each configured router term, its effect on the gradient with respect to a synthetic router's
    logits."""
    moe = config.trainer.moe
    keys = [key for key in ROUTER_TERMS if getattr(moe, key)]
    if not keys:
        return
    spec = configured_model(config)
    refuse(broken(rules_in(trainer_rules), config.facts | {"spec": spec}, before=config.facts))
    sizes = RouterSizes.of(spec)
    full = router_gradient(config, probe, sizes)
    for key in keys:
        trainer = config.trainer.model_copy(update={"moe": moe.model_copy(update={key: 0.0})})
        share = _share(full, router_gradient(config.model_copy(update={"trainer": trainer}), probe, sizes))
        yield _effect(f"trainer.moe.{key}", getattr(moe, key), share, True, _router_reason(key, sizes))


def _router_reason(key: str, sizes: RouterSizes) -> str:
    if key == "aux_loss_coef" and sizes.topk == sizes.experts:
        return f"every token is routed to all {sizes.experts} experts, so their load is always balanced"
    return "its effect is lost in rounding next to the rest of the router's gradient; raise it"


def _belongs(algorithm: Algorithm, key: str) -> bool:
    return key not in NEEDS or NEEDS[key][0](algorithm)


def _value(algorithm: Algorithm, key: str) -> Any:
    """Returns the value of `key`, such as `kl_coef` or `loss.low`; None if the loss or advantages lack the
    parameter."""
    section, _, name = key.rpartition(".")
    if not section:
        return getattr(algorithm, name, None)
    return getattr(getattr(algorithm, section), name, None)


def _default(algorithm: Algorithm, key: str) -> Any:
    """Returns the default of `key` for the configured algorithm, loss and advantages."""
    section, _, name = key.rpartition(".")
    if not section:
        return algorithm.default(name)
    kind = getattr(algorithm, section).kind
    return getattr(read_objective(section, {"kind": kind}, algorithm.default(section)), name)


def _changed(algorithm: Algorithm, key: str, value: Any) -> Algorithm:
    """Returns a copy of `algorithm` with `key` set to `value`, without validation, because some neutral values would be
    refused."""
    section, _, name = key.rpartition(".")
    if not section:
        return algorithm.model_copy(update={name: value})
    objective = getattr(algorithm, section).model_copy(update={name: value})
    return algorithm.model_copy(update={section: objective})


def _without(algorithm: Algorithm, term: Term) -> Algorithm:
    """Returns a copy of `algorithm` in which `term` has its neutral value."""
    if term.key == "loss.share":  # at least one token is always selected, so use a loss without selection
        bounds = {"low": 1.0, "high": FAR, "dual": None}
        for name, value in algorithm.loss:
            if name in bounds:
                bounds[name] = value
        return algorithm.model_copy(update={"loss": Clip(kind="clip", **bounds)})
    if term.key == "old_logprobs":  # without it, corrections have nothing to compare
        algorithm = algorithm.model_copy(update={"correction": Correction(), "rejection": Rejection()})
    return _changed(algorithm, term.key, term.neutral)


def _share(with_it: np.ndarray, without: np.ndarray) -> float:
    size = max(float(np.linalg.norm(with_it)), float(np.linalg.norm(without)))
    difference = float(np.linalg.norm(with_it - without))
    if size and difference > EXACT * size:
        return difference / size
    return 0.0


def _shown(value: Any) -> Any:
    if isinstance(value, Correction):
        return value.kind
    if not isinstance(value, Rejection):
        return value
    if value.level == "none":
        return f"veto {value.veto:g}"
    return value.level


def describe(terms: list[Effect]) -> list[str]:
    """Returns one line of text per term, with the term's value and the relative change in the gradient that it
    causes."""
    width = max(len(effect.key) for effect in terms)
    lines = []
    for effect in terms:
        result = f"  NOTHING: {effect.reason}"
        if effect.share:
            result = f"{_percent(effect.share)} of the gradient"
        lines.append(f"  {effect.key:<{width}}  {effect.value!s:<12} {result}")
    return lines


def _percent(share: float) -> str:
    if share < 1e-3:
        return f"{100 * share:5.0e}%"
    return f"{share:6.1%}"
