"""Effects of the configured terms: gradients of a small invented batch, with each term and without it.

A coefficient that contributes exactly nothing looks like one that works: nothing fails, and a run is lost. Most such
cases are refused by the configuration; those here are combinations, such as a clip around a ratio that is always 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimx.config.rule import broken, refuse, rules_in
from slimx.config.schema import Config
from slimx.config.sections.algorithm import NEEDS, Algorithm, Correction, Rejection
from slimx.config.sections.objectives import Clip, read_objective
from slimx.config.sections.schedule import Schedule
from slimx.extras.doctor.effects.probe import Probe, make_probe, policy_gradient, value_gradient
from slimx.extras.doctor.effects.router_probe import RouterSizes, router_gradient
from slimx.models.families import configured_model
from slimx.rules import trainer as trainer_rules

EXACT = 1e-12
"""Relative size below which a difference of two fp64 gradients is rounding."""


SELECTED = 0.2
"""Share of the probe's tokens that clip_cov and kl_cov select at least: of so few theirs would be a single one."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One configured term."""

    key: str
    value: Any
    share: float
    """Size of what it changes in the gradient over the size of the gradient: |with - without| / max(|with|,
    |without|)."""
    chosen: bool
    """True if the configuration says so, rather than a default."""
    reason: str | None = None
    """Why it changes nothing, where it does not."""


@dataclass(frozen=True, slots=True)
class Term:
    """A key of section algorithm, or a parameter of its loss or estimator, and what to put there instead to be without
    it."""

    key: str
    neutral: Any
    reason: Callable[[Config], str | None] = lambda config: None


def _ratio_is_one(config: Config) -> str | None:
    if config.algorithm.old_logprobs == "recompute" and config.schedule.updates_per_step == 1:
        return (
            "with algorithm.old_logprobs=recompute and schedule.updates_per_step=1 policy and old policy are the same "
            "weights, and the ratio is 1 at every token; take several updates per step, or "
            "algorithm.old_logprobs=rollout"
        )
    return None


def _values_are_old(schedule: Schedule) -> str | None:
    if schedule.updates_per_step == 1:
        return (
            "in a step's only update (schedule.updates_per_step=1) the values are the old ones, and nothing is clipped"
        )
    return None


def _nothing_compared(config: Config) -> str | None:
    if config.rollout.group_size == 1 and config.algorithm.group_relative:
        return "rollout.group_size is 1, and a rollout alone in its group has the advantage 0"
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
"""In the order of the configuration. Keys that have no effect under an algorithm are refused there
(`slimx.config.sections.algorithm.NEEDS`) and not looked at here."""


ROUTER_TERMS = ("aux_loss_coef", "z_loss_coef")
"""Keys of `trainer.moe` that add to the loss."""


def effects(config: Config) -> list[Effect]:
    """Every term of the configured loss with its share in the gradient of the probe batch; takes no GPU or engine, and
    of the model config.json only, where its routers have losses.

    Raises SlimxError if they have and there is none, or the model has no routers."""
    probe, algorithm = make_probe(config), config.algorithm
    share = _value(algorithm, "loss.share")
    if share is not None:
        algorithm = _changed(algorithm, "loss.share", max(share, SELECTED))
        config = config.model_copy(update={"algorithm": algorithm})
    return [*_policy_effects(config, probe), *_value_effects(config, probe), *_router_effects(config, probe)]


def _policy_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    algorithm = config.algorithm
    if algorithm.scores:
        return  # of a pair; the probe batch is a policy's
    whole = policy_gradient(config, probe)
    if algorithm.loss.kind == "sft" or "loss" in algorithm.hooks:
        share = _share(whole, np.zeros_like(whole))
        yield Effect("algorithm.loss", algorithm.loss.kind, share, True, None if share else "its gradient is 0")
    if algorithm.loss.kind != "sft" and algorithm.advantages.kind != "none":
        share = _share(whole, policy_gradient(config, probe, without_advantages=True))
        reason = None if share else _nothing_compared(config) or "every advantage of the probe batch is 0"
        yield Effect("algorithm.advantages", algorithm.advantages.kind, share, True, reason)
    for term in () if algorithm.loss.kind == "sft" else TERMS:
        value = _value(algorithm, term.key)
        if value in (None, term.neutral) or not _belongs(algorithm, term.key):
            continue
        other = config.model_copy(update={"algorithm": _without(algorithm, term)})
        share = _share(whole, policy_gradient(other, probe))
        reason = None if share else term.reason(config) or "the gradient of the probe batch is the same without it"
        yield Effect(f"algorithm.{term.key}", _shown(value), share, value != _default(algorithm, term.key), reason)


def _value_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    if config.critic is None or not config.critic.value_clip:
        return
    critic = config.critic.model_copy(update={"value_clip": 0.0})
    share = _share(value_gradient(config, probe), value_gradient(config.model_copy(update={"critic": critic}), probe))
    reason = None if share else _values_are_old(config.schedule)
    chosen = config.critic.value_clip != type(config.critic).model_fields["value_clip"].default
    yield Effect("critic.value_clip", config.critic.value_clip, share, chosen, reason)


def _router_effects(config: Config, probe: Probe) -> Iterator[Effect]:
    """Shares in the gradient of an invented router's logits."""
    moe = config.trainer.moe
    if not (keys := [key for key in ROUTER_TERMS if getattr(moe, key)]):
        return
    spec = configured_model(config)
    refuse(broken(rules_in(trainer_rules), {"trainer": config.trainer, "spec": spec}))
    sizes = RouterSizes.of(spec)
    whole = router_gradient(config, probe, sizes)
    for key in keys:
        trainer = config.trainer.model_copy(update={"moe": moe.model_copy(update={key: 0.0})})
        share = _share(whole, router_gradient(config.model_copy(update={"trainer": trainer}), probe, sizes))
        reason = None if share else _router_reason(key, sizes)
        yield Effect(f"trainer.moe.{key}", getattr(moe, key), share, True, reason)


def _router_reason(key: str, sizes: RouterSizes) -> str:
    if key == "aux_loss_coef" and sizes.topk == sizes.experts:
        return f"every token takes all {sizes.experts} experts, whose load is even whatever the router says"
    return "it is lost in rounding beside the rest of the router's gradient; raise it"


def _belongs(algorithm: Algorithm, key: str) -> bool:
    return key not in NEEDS or NEEDS[key][0](algorithm)


def _value(algorithm: Algorithm, key: str) -> Any:
    """The value of a key such as `kl_coef` or `loss.low`; None where the loss or estimator has no such parameter."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(algorithm, section) if section else algorithm, name, None)


def _default(algorithm: Algorithm, key: str) -> Any:
    """The value of `key` under this algorithm's name, for its kind of loss and estimator, where nothing is said."""
    section, _, name = key.rpartition(".")
    if not section:
        return algorithm.default(name)
    kind = getattr(algorithm, section).kind
    return getattr(read_objective(section, {"kind": kind}, algorithm.default(section)), name)


def _changed(algorithm: Algorithm, key: str, value: Any) -> Algorithm:
    """`algorithm` with another value; not checked again, since some neutral values are refused by name."""
    section, _, name = key.rpartition(".")
    if section:
        name, value = section, getattr(algorithm, section).model_copy(update={name: value})
    return algorithm.model_copy(update={name: value})


def _without(algorithm: Algorithm, term: Term) -> Algorithm:
    """`algorithm` with the neutral value."""
    if term.key == "loss.share":  # one token is selected at least: without it means without the selection
        bounds = {"low": 1.0, "high": FAR, "dual": None}
        given = {name: value for name, value in algorithm.loss if name in bounds}
        return algorithm.model_copy(update={"loss": Clip(kind="clip", **(bounds | given))})
    if term.key == "old_logprobs":  # what compares the two has nothing to compare
        algorithm = algorithm.model_copy(update={"correction": Correction(), "rejection": Rejection()})
    return _changed(algorithm, term.key, term.neutral)


def _share(with_it: np.ndarray, without: np.ndarray) -> float:
    size = max(float(np.linalg.norm(with_it)), float(np.linalg.norm(without)))
    difference = float(np.linalg.norm(with_it - without))
    return difference / size if size and difference > EXACT * size else 0.0


def _shown(value: Any) -> Any:
    if isinstance(value, Rejection):
        return value.level if value.level != "none" else f"veto {value.veto:g}"
    return value.kind if isinstance(value, Correction) else value


def describe(found: list[Effect]) -> list[str]:
    """One line per term."""
    width = max(len(effect.key) for effect in found)
    return [
        f"  {effect.key:<{width}}  {effect.value!s:<12} "
        + (f"{_percent(effect.share)} of the gradient" if effect.share else f"  NOTHING: {effect.reason}")
        for effect in found
    ]


def _percent(share: float) -> str:
    return f"{share:6.1%}" if share >= 1e-3 else f"{100 * share:5.0e}%"
