"""Low-rank adapters as the core sees them (`slimx.layout.form`). Imports neither torch nor megatron-core before it
needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slimx.config.sections.policies import ACTOR
from slimx.extras.lora.targets import adapter_parts, adapter_targets, served_modules
from slimx.layout.form import AttachedForm, ServedForm, WeightForm
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part
from slimx.layout.ranks import Sizes, sizes_of
from slimx.layout.table import Table
from slimx.numerics.mode import mode_of

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config


OPTION = "--publish-adapters"
"""Option of `slimx.engines.server.launch`, with POLICY=ALPHA,... of the policies whose adapters a server gets."""
HEALTH_CHECK = "HEALTH_CHECK"
"""Begin of the ids of requests by which SGLang asks itself for a token."""


@dataclass(frozen=True, slots=True)
class ServedLora(ServedForm):
    """Adapters in a server, beside weights to which they are not merged: those of each policy in a slot, all of one
    rank and of the same modules."""

    alphas: dict[str, float]
    """By policy, whose name is SGLang's name for its adapters, too. A request that names none, where there is one,
    gets its adapters."""
    rank: int = 0
    """0 in the server itself, which has this and the modules as SGLang's arguments."""
    modules: tuple[str, ...] = ()
    """Names of the modules that have one, as checkpoints have them."""

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self.alphas)

    def server_arguments(self, device: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(self.modules),
            "max_loras_per_batch": len(self.alphas) + 1,  # with the slot without any that SGLang keeps
        }
        if device == "cpu":
            arguments["lora_backend"] = "torch_native"
        return arguments

    def command_line(self) -> list[str]:
        return [OPTION, ",".join(f"{name}={alpha}" for name, alpha in self.alphas.items())]

    def contract(self) -> dict[str, Any]:
        return {"rank": self.rank, "scales": {name: alpha / self.rank for name, alpha in self.alphas.items()}}

    def check_request(self, request: Any) -> None:
        """Refuses a request that names no adapters where it has to, or unknown ones, which would end the scheduler."""
        named = request.lora_id
        if named is None and (len(self.alphas) == 1 or str(request.rid).startswith(HEALTH_CHECK)):
            return
        if named not in self.alphas:
            raise ValueError(
                f"this server computes with the adapters of {', '.join(self.alphas)}, and the request "
                + ("names none" if named is None else f"names {named}")
                + "; ask through the policy's engine (ctx.policies[NAME].engine), or name one of them in the request: "
                'custom_labels={"slimx": "{\\"lora_id\\": \\"NAME\\"}"}'
            )

    def register(self, registry: Any, kinds: Any) -> None:
        from slimx.extras.lora.adapters import sglang

        sglang.register(registry, kinds, self.alphas)

    def attest(self, runner: Any) -> dict[str, Any] | None:
        from slimx.extras.lora.adapters import sglang

        return sglang.attest(runner.lora_manager)


class LoraForm(WeightForm):
    """Weights that stay as they are, and adapters beside them, published merged or alone (`publish.adapters`). The
    option names the policies whose adapters a server computes with: POLICY=ALPHA,..."""

    OPTION: ClassVar[str | None] = OPTION

    def __init__(self, config: Config):
        self._config, self._lora = config, config.trainer.lora

    @classmethod
    def configured(cls, config: Config) -> Self | None:
        return None if config.trainer.lora is None else cls(config)

    @classmethod
    def parse(cls, argument: str) -> ServedLora:
        pairs = (each.split("=") for each in argument.split(","))
        return ServedLora({name: float(alpha) for name, alpha in pairs})

    def published_parts(self, table: Table, sizes: Sizes) -> tuple[Sequence[Part], Sequence[Part]]:
        if not self._config.serves_adapters:
            return (), ()
        targets, rank = self._lora.targets, self._lora.rank
        source = adapter_parts(MegatronLayout(table, sizes).parts(), targets, rank)
        return source, [*adapter_targets(table, targets, rank)]

    def served(self) -> ServedForm:
        config, lora = self._config, self._lora
        if not config.serves_adapters:
            return ServedForm()
        alphas = {ACTOR: lora.alpha}
        if config.served_beside:
            policies = config.by_policy
            alphas |= {name: policies[name].trainer.lora.alpha for name in config.served_beside}
        return ServedLora(alphas, lora.rank, served_modules(lora.targets))

    def attach(self, module: torch.nn.Module, table: Table) -> AttachedForm:
        import torch.distributed as dist

        from slimx.extras.lora.adapters.megatron import attach
        from slimx.extras.lora.attached import AttachedAdapters
        from slimx.extras.lora.peft import fill

        config, lora = self._config, self._lora
        parts = MegatronLayout(table, sizes_of(config.trainer)).held(dist.get_rank())
        merging = mode_of(config).replaces_layers
        adapters = attach(module, parts, table, lora, seed=config.run.seed, merging=merging)
        if lora.load is not None:
            fill({name: adapter.parameters for name, adapter in adapters.items()}, parts, lora.load)
        return AttachedAdapters(adapters, alone=config.serves_adapters)
