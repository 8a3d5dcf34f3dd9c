"""Decoders of vision-language models: the first pipeline stage also stores the vision tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimx.extras.recurrent.delta_nets import DeltaNets
from slimx.layout.table import Row
from slimx.models.layer_kind import LayerKind

if TYPE_CHECKING:
    import torch

    from slimx.layout.ranks import Sizes


@dataclass(frozen=True)
class TowerMixin(LayerKind):
    """Mixin that adds the parameters of a vision tower, which no layer computes with, to the first pipeline stage. They
    are frozen; exports and publications contain them like all other parameters."""

    tower: tuple[Row, ...] = ()
    """The tower's rows in the trainer's weight table."""

    def model_class(self, kind: Callable[..., torch.nn.Module], sizes: Sizes) -> Callable[..., torch.nn.Module]:
        build = super().model_class(kind, sizes)

        def with_tower(*args: object, pre_process: bool, **options: object) -> torch.nn.Module:
            from slimx.extras.vision.constants import add_constants

            model = build(*args, pre_process=pre_process, **options)
            if pre_process:
                add_constants(model, {row.name: row.sources[0][1] for row in self.tower})
            return model

        return with_tower


@dataclass(frozen=True)
class DeltaNetsWithTower(TowerMixin, DeltaNets):
    """Gated delta nets and attention, with a vision tower (Qwen3.5)."""
