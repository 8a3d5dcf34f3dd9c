"""Decoders of vision-language models: the first pipeline stage also has the vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slimx.extras.recurrent.delta_nets import DeltaNets
from slimx.extras.vision.costs import TowerCosts
from slimx.extras.vision.tower import Tower
from slimx.layout.table import Row
from slimx.models.layer_kind import LayerKind, MicrobatchSetting, ModelFields

if TYPE_CHECKING:
    import torch

    from slimx.layout.ranks import Sizes


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Computation of the embeddings of images in a run's trainers."""

    tower: Tower
    train: Literal["none", "projector", "tower"]
    """The value of `trainer.vision.train`."""
    directory: str
    """Directory of the run's image store."""
    costs: TowerCosts


@dataclass(frozen=True)
class WithTower(LayerKind):
    """Decoder with attention in every layer and a vision tower.

    Without `inputs`, the tower consists of frozen parameters, which no layer computes with; exports and publications
    contain them like all other parameters."""

    fuses_rotation: ClassVar[bool] = False  # the fused kernels take positions from the sequence bounds
    rows: tuple[Row, ...] = ()
    """Rows of the tower's parameters in the trainer's weight table."""
    inputs: ImageInputs | None = None
    """None: prompts have no images."""

    def model_class(self, kind: Callable[..., torch.nn.Module], sizes: Sizes) -> Callable[..., torch.nn.Module]:
        build = super().model_class(kind, sizes)
        return self._with_constants(build) if self.inputs is None else _with_images(build, self.inputs)

    def microbatch_bytes(self, model: ModelFields, setting: MicrobatchSetting, layers: Sequence[int]) -> float:
        nbytes = super().microbatch_bytes(model, setting, layers)
        if self.inputs is not None and 0 in layers:
            nbytes += self.inputs.costs.kept_bytes(setting)
        return nbytes

    def input_work(self, setting: MicrobatchSetting) -> float:
        return 0.0 if self.inputs is None else self.inputs.costs.work_bytes(setting)

    def input_flops(self) -> float:
        return 0.0 if self.inputs is None else self.inputs.costs.rollout_flops()

    def _with_constants(self, build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        def make(*args: object, pre_process: bool, **options: object) -> torch.nn.Module:
            from slimx.extras.vision.constants import add_constants

            model = build(*args, pre_process=pre_process, **options)
            if pre_process:
                add_constants(model, {row.name: row.sources[0][1] for row in self.rows})
            return model

        return make


def _with_images(build: Any, inputs: ImageInputs) -> Callable[..., torch.nn.Module]:
    from slimx.extras.vision.images.store import ImageStore
    from slimx.extras.vision.model import VisionInputs

    seeing = type(f"{build.__name__}WithImages", (VisionInputs, build), {})

    def make(*args: object, **options: object) -> torch.nn.Module:
        model = seeing(*args, **options)
        model.attach(inputs.tower, ImageStore(inputs.directory), train=inputs.train)
        return model

    return make


@dataclass(frozen=True)
class DeltaNetsWithTower(WithTower, DeltaNets):
    """Gated delta nets and attention, with a vision tower (Qwen3.5)."""
