"""Low-rank adapters as the core sees them (`slimx.layout.form`). Imports neither torch nor megatron-core before it
needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from slimx.layout.form import AttachedForm, WeightForm
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import sizes_of
from slimx.layout.table import Table
from slimx.numerics.mode import mode_of

if TYPE_CHECKING:
    import torch

    from slimx.config.schema import Config


class Lora(WeightForm):
    """Weights that stay as they are, and adapters beside them, published merged or alone (`publish.adapters`)."""

    def __init__(self, config: Config):
        self._config, self._lora = config, config.trainer.lora

    @classmethod
    def configured(cls, config: Config) -> Self | None:
        return None if config.trainer.lora is None else cls(config)

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
