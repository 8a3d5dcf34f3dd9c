"""Activation strategies: combinations of recomputation and offloading that reduce the memory of activations, and the
rules that allow them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from slimx.config.rule import FACTS, Rule, all_rules, broken
from slimx.extras.planner.memory_record import TrainerMemory
from slimx.extras.planner.plan.splits import Fields

_OFFLOAD_CODES = ("activations.device", "unproven", "unproven.layers")
"""Codes of errors about offloading that depend neither on which parts are offloaded nor on recomputation."""


@functools.cache
def strategy_rules() -> tuple[Rule, ...]:
    """Returns the rules that concern only the configuration, and the rules about activations. A strategy that breaks
    one of them is skipped."""
    codes = ("activations.", "unproven.layers")
    out = []
    for rule in all_rules():
        if rule.facts.isdisjoint(FACTS) or rule.code.startswith(codes):
            out.append(rule)
    return tuple(out)


def allowed(facts: Mapping[str, Any]) -> bool:
    """Returns True if `facts` break no rule about activations and no rule that concerns only the configuration."""
    for problem in broken(strategy_rules(), facts):
        if problem.code != "unproven.layers" or problem.about == "trainer.offload_activations":
            return False
    return True


class ActivationStrategy(NamedTuple):
    """Combination of settings for activation recomputation and offloading."""

    recompute: dict[str, Any]
    offload: tuple[str, ...] = ()
    moments: float | None = None
    """Fraction of the optimizer's moments that is kept on the host; None: as configured."""

    @property
    def fields(self) -> Fields:
        """Values of section `trainer` that this strategy sets, by key, without `optimizer.offload_fraction`."""
        return {"recompute": self.recompute, "offload_activations": self.offload}


_NONE = {"granularity": "none"}
_FULL = {"granularity": "full", "method": "uniform", "layers": 1}
_CHEAP: dict[str, Any] = {"granularity": "selective", "modules": ["layernorm", "moe_act"]}
"""Recomputation settings for the modules that contain no matrix products."""
_RECOMPUTED = (
    ["layernorm", "moe_act", "core_attn"],
    ["layernorm", "moe_act", "mla_up_proj"],
    ["layernorm", "moe_act", "mlp"],
    ["layernorm", "moe_act", "shared_experts"],
    ["layernorm", "core_attn", "moe"],
    ["layernorm", "moe"],
)
_OFFLOADED: tuple[tuple[str, ...], ...] = (
    ("expert_fc1",),
    ("expert_fc1", "moe_act"),
    ("core_attn", "attn_proj", "expert_fc1", "moe_act"),
)
STRATEGIES = (
    ActivationStrategy(_NONE),
    ActivationStrategy(_CHEAP),
    *(ActivationStrategy({**_CHEAP, "modules": modules}) for modules in _RECOMPUTED),
    *(ActivationStrategy(_NONE, parts) for parts in _OFFLOADED),
    ActivationStrategy(_FULL),
    ActivationStrategy(_FULL, (), 1),
)
"""Strategies in the order in which they are tried: the first costs the least time, the last uses the least GPU
memory."""


def without_refused_offloads(records: tuple[TrainerMemory, ...], facts: Mapping[str, Any]) -> tuple[TrainerMemory, ...]:
    """Returns `records` without the savings of offloading (`TrainerMemory.parts`) if a rule forbids offloading for this
    run."""
    trainer = facts["trainer"].model_copy(update={"offload_activations": _OFFLOADED[-1]})
    problems = broken(strategy_rules(), {**facts, "trainer": trainer})
    if not any(problem.code in _OFFLOAD_CODES for problem in problems):
        return records
    out = []
    for record in records:
        parts: dict[str, int] = {}
        for name, nbytes in record.parts.items():
            if not name.startswith("offload "):
                parts[name] = nbytes
        out.append(record.model_copy(update={"parts": parts}))
    return tuple(out)
