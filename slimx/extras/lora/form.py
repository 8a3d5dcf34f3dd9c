"""Low-rank adapters as a weight form (`slimx.layout.form`), the entry point of this extra.

The module imports torch and megatron-core only when they are needed."""

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
    from slimx.config.sections.trainer import Lora


OPTION = "--publish-adapters"
"""Option of `slimx.engines.server.launch` that names the policies whose adapters a server serves: POLICY=ALPHA,..."""
HEALTH_CHECK = "HEALTH_CHECK"
"""Prefix of the ids that SGLang assigns to health-check requests."""


@dataclass(frozen=True, slots=True)
class ServedLora(ServedForm):
    """Form of the weights in a server with unmerged adapters: the base weights, and one slot per policy for its
    adapters. All adapters have the same rank and belong to the same modules."""

    alphas: dict[str, float]
    """Policy -> alpha of its adapters. In SGLang the adapters have the policy's name. If there is only one policy,
    requests that name no adapters use this policy's."""
    rank: int = 0
    """Rank of the adapters; 0 in the server process, which gets rank and modules from SGLang's arguments instead."""
    modules: tuple[str, ...] = ()
    """Names of the adapted modules, as in checkpoints: "q_proj", ..."""

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self.alphas)

    def server_arguments(self, device: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(self.modules),
            "max_loras_per_batch": len(self.alphas) + 1,  # one slot stays without adapters
        }
        if device == "cpu":
            arguments["lora_backend"] = "torch_native"
        return arguments

    def command_line(self) -> list[str]:
        return [OPTION, ",".join(f"{name}={alpha}" for name, alpha in self.alphas.items())]

    def contract(self) -> dict[str, Any]:
        return {"rank": self.rank, "scales": {name: alpha / self.rank for name, alpha in self.alphas.items()}}

    def check_request(self, request: Any) -> None:
        """Raises ValueError for a request that names unknown adapters, or that names none although there are several
        policies, because such a request would crash SGLang's scheduler."""
        named = request.lora_id
        if named is None and (len(self.alphas) == 1 or str(request.rid).startswith(HEALTH_CHECK)):
            return
        if named not in self.alphas:
            name = "none" if named is None else named
            raise ValueError(
                f"this server has the adapters of {', '.join(self.alphas)}, but the request names {name}; send the "
                "request through ctx.policies[NAME].engine, or name one of these policies in the request with "
                'custom_labels={"slimx": "{\\"lora_id\\": \\"NAME\\"}"}'
            )

    def register(self, registry: Any, kinds: Any) -> None:
        from slimx.extras.lora.adapters import sglang

        sglang.register(registry, kinds, self.alphas)

    def attest(self, runner: Any) -> dict[str, Any] | None:
        from slimx.extras.lora.adapters import sglang

        return sglang.attest(runner.lora_manager)


class LoraForm(WeightForm):
    """Weight form of a run with frozen weights and low-rank adapters. Publications contain merged weights or only the
    adapters (`publish.adapters`).

    The option of the engine's server names the policies whose adapters it serves: POLICY=ALPHA,..."""

    OPTION: ClassVar[str | None] = OPTION

    def __init__(self, config: Config, lora: Lora):
        self._config = config
        self._lora = lora

    @classmethod
    def configured(cls, config: Config) -> Self | None:
        lora = config.trainer.lora
        return None if lora is None else cls(config, lora)

    @classmethod
    def parse(cls, argument: str) -> ServedLora:
        alphas = {}
        for pair in argument.split(","):
            name, alpha = pair.split("=")
            alphas[name] = float(alpha)
        return ServedLora(alphas)

    def published_parts(self, table: Table, sizes: Sizes) -> tuple[Sequence[Part], Sequence[Part]]:
        if not self._config.serves_adapters:
            return (), ()
        targets = self._lora.targets
        rank = self._lora.rank
        source = adapter_parts(MegatronLayout(table, sizes).parts(), targets, rank)
        return source, [*adapter_targets(table, targets, rank)]

    def served(self) -> ServedForm:
        config = self._config
        if not config.serves_adapters:
            return ServedForm()
        alphas = {ACTOR: self._lora.alpha}
        policies = config.by_policy if config.served_by_actor else {}
        for name in config.served_by_actor:
            lora = policies[name].trainer.lora
            if lora is not None:
                alphas[name] = lora.alpha
        return ServedLora(alphas, self._lora.rank, served_modules(self._lora.targets))

    def attach(self, module: torch.nn.Module, table: Table) -> AttachedForm:
        import torch.distributed as dist

        from slimx.extras.lora.adapters.megatron import attach
        from slimx.extras.lora.attached import AttachedAdapters
        from slimx.extras.lora.peft import fill

        config = self._config
        lora = self._lora
        parts = MegatronLayout(table, sizes_of(config.trainer)).parts_of(dist.get_rank())
        merging = mode_of(config).replaces_layers
        adapters = attach(module, parts, table, lora, seed=config.run.seed, merging=merging)
        if lora.load is not None:
            fill({name: adapter.parameters for name, adapter in adapters.items()}, parts, lora.load)
        return AttachedAdapters(adapters, alone=config.serves_adapters)
