"""The fields of an EngineSpec that a configuration decides."""

from __future__ import annotations

from typing import Any

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.policies import ACTOR
from slimx.engines.server.spec import ServedLora
from slimx.layout.adapters import served_modules
from slimx.layout.ranks import engine_sizes
from slimx.numerics.mode import NumericsMode, mode_of


def spec_values(config: Config, group: Engines, name: str, *, device: str, moe: bool) -> dict[str, Any]:
    """The fields of an EngineSpec for a server `name` of `group`, but those that differ between starts."""
    return {
        "name": name,
        "model_path": group.model or config.model.path,
        "sizes": engine_sizes(group),
        "dtype": config.numerics.dtype,
        "device": device,
        "threads": group.threads,
        "max_total_tokens": group.max_total_tokens,
        "seed": config.run.seed,
        "routed_experts": moe and config.rollout.routed_experts,
        "sglang": group.sglang if config.track.prometheus.port is None else {"enable_metrics": True, **group.sglang},
        "role": group.role,
        "frozen": group.frozen,
        "numerics": NumericsMode() if group.frozen else mode_of(config),
        "draft": config.publishes_draft(group),
        "adapters": None if group.frozen else served_lora(config),
        "precompile": group.precompile,
        "sleeps": config.schedule.colocate and not group.frozen,
    }


def served_lora(config: Config) -> ServedLora | None:
    """The adapters that servers of the policy compute with; None: they get weights alone."""
    lora = config.trainer.lora
    if lora is None or not config.serves_adapters:
        return None
    alphas = {ACTOR: lora.alpha}
    if config.served_beside:
        by_policy = config.by_policy
        alphas |= {name: by_policy[name].trainer.lora.alpha for name in config.served_beside}
    return ServedLora(lora.rank, alphas, served_modules(lora.targets))
