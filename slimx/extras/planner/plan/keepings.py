"""Ways to get activations from the forward to the backward pass, and which of them the rules allow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from slimx.config.rule import Rule, all_rules, broken
from slimx.config.schema import Config
from slimx.extras.planner.memory_record import TrainerMemory
from slimx.extras.planner.plan.splits import Fields

_BESIDE = ("activations.device", "unproven", "unproven.layers")
"""Codes of what refuses offloading whatever the parts are, recomputation aside."""


@functools.cache
def kept_rules() -> tuple[Rule, ...]:
    """Rules of a configuration and of how activations are kept; what breaks one is passed over."""
    kept = ("activations.", "unproven.layers")
    return tuple(rule for rule in all_rules() if rule.facts <= Config.model_fields.keys() or rule.code.startswith(kept))


def allowed(facts: Mapping[str, Any]) -> bool:
    """True if no rule about activations, and none of the configuration, is broken."""
    problems = broken(kept_rules(), facts)
    return all(each.code == "unproven.layers" and each.about != "trainer.offload_activations" for each in problems)


class Keeping(NamedTuple):
    """A way to get activations from the forward to the backward pass."""

    recompute: dict[str, Any]
    offload: tuple[str, ...] = ()
    moments: float | None = None
    """Share of the moments on the host; None: as configured."""

    @property
    def fields(self) -> Fields:
        """Keys of the trainer section, but for the moments'."""
        return {"recompute": self.recompute, "offload_activations": self.offload}


_NONE, _FULL = {"granularity": "none"}, {"granularity": "full", "method": "uniform", "layers": 1}
_CHEAP: dict[str, Any] = {"granularity": "selective", "modules": ["layernorm", "moe_act"]}
"""Modules without matrix products."""
_MODULES = (["core_attn"], ["mla_up_proj"], ["mlp"], ["shared_experts"], ["core_attn", "moe"], ["moe"])
_OFFLOADED: tuple[tuple[str, ...], ...] = (
    ("expert_fc1",),
    ("expert_fc1", "moe_act"),
    ("core_attn", "attn_proj", "expert_fc1", "moe_act"),
)
KEEPINGS = (
    Keeping(_NONE),
    Keeping(_CHEAP),
    *(
        Keeping({**_CHEAP, "modules": ["layernorm", *(() if "moe" in more else ("moe_act",)), *more]})
        for more in _MODULES
    ),
    *(Keeping(_NONE, parts) for parts in _OFFLOADED),
    Keeping(_FULL),
    Keeping(_FULL, (), 1),
)
"""Ways that are tried: the first costs least, the last leaves least on the device."""


def told_parts(records: tuple[TrainerMemory, ...], facts: Mapping[str, Any]) -> tuple[TrainerMemory, ...]:
    """`records` without what offloading would take off their activations where a rule refuses it."""
    tried = facts["trainer"].model_copy(update={"offload_activations": _OFFLOADED[-1]})
    if not any(problem.code in _BESIDE for problem in broken(kept_rules(), {**facts, "trainer": tried})):
        return records
    return tuple(
        record.model_copy(
            update={"parts": {name: n for name, n in record.parts.items() if not name.startswith("offload ")}}
        )
        for record in records
    )
