"""Base class of families of vision-language models: a family without images and a vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from slimx.config.schema import Config
from slimx.extras.vision.costs import TowerCosts
from slimx.extras.vision.layer_kinds import ImageInputs, WithTower
from slimx.extras.vision.nesting import Stack, nested_table, separate_experts, text_config
from slimx.extras.vision.tower import Tower, rotary_axes
from slimx.json_types import Json
from slimx.layout.table import Row, Table
from slimx.models import decoder
from slimx.models.families import Family, ModelSpec
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind

_TOKENS = (
    *("image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
)


class TowerKind(Protocol):
    """Module of `slimx.extras.vision.towers`, which describes one kind of vision tower."""

    PREFIX: str
    """Prefix of the tower's parameters in trainers and in SGLang."""
    PROJECTOR: tuple[str, ...]
    """Prefixes of the parameters that map the tower's output to embeddings."""

    def rows(self, vision: HfConfig) -> tuple[Row, ...]:
        """Returns the trainer's weight-table rows of the tower. `vision`: result of `VisionFamily._vision`."""
        ...

    def bridge_rows(self, vision: HfConfig) -> tuple[Row, ...]:
        """Returns the rows of the tensors that Megatron-Bridge stores in place of those in `rows`, in the same
        order."""
        ...

    def engine_rows(self, vision: HfConfig) -> tuple[Row, ...]:
        """Returns SGLang's weight-table rows of the tower."""
        ...


class VisionFamily:
    """Family whose language model is that of another family. Implements `slimx.models.families.Family`."""

    UNTRAINED: Sequence[str] = ("*visual.*",)

    def __init__(
        self,
        architecture: str,
        *,
        text: Family,
        tower: TowerKind,
        module: str,
        sections: tuple[int, int, int] | None = None,
        interleaved: bool = False,
        nested: bool = True,
        stack: Stack | None = None,
        fixed: Mapping[str, object] = MappingProxyType({}),
        tower_fixed: Mapping[str, object] = MappingProxyType({}),
        rotary_fraction: float = 1.0,
    ):
        """Describes the family `architecture`.

        `text`: family of the language model. `tower`: rows of the vision tower, whose class in transformers is `module`
        (MODULE:NAME). `sections`: value of `mrope_section` if config.json lacks it, as in transformers; None if
        embeddings of images have the positions of ordinary tokens. `interleaved`: as in `rotary_axes`. `nested`: False
        if checkpoints name the language model's tensors as its own family does; config.json may then have its fields at
        the top level. `stack`: how checkpoints stack experts; None if they do not. `fixed`: fields of the language
        model that have this value, even if config.json lacks them. `tower_fixed`: fields of the tower that config.json
        may only set to this value. `rotary_fraction`: rotated fraction of a head if config.json does not set it."""
        self.ARCHITECTURE = architecture
        self.text = text
        self.tower = tower
        self.module = module
        self.default_sections = sections
        self.interleaved = interleaved
        self.nested = nested
        self.stack = stack
        self.separate_experts = separate_experts if stack else None
        self.fixed = fixed
        self.tower_fixed = tower_fixed
        self.rotary_fraction = rotary_fraction

    def unsupported(self, hf: HfConfig) -> str | None:
        """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
        supported."""
        text = self._text(hf)
        for key in _TOKENS:  # read and ignored, because the language model treats these tokens like any others
            hf.get(key)
            text.get(key)
        if self.default_sections is not None:
            rotary = decoder.rotary(text)[1]
            for key in ("mrope_section", "mrope_interleaved"):
                rotary.get(key)  # read and ignored: without images, all axes have the same positions
        problem = decoder.unsupported_field(text, *self.fixed.items()) or self._unsupported_text(text)
        if problem:
            return f"text_config.{problem}" if "text_config" in hf else problem
        problem = decoder.unsupported_field(hf["vision_config"], *self.tower_fixed.items())
        if problem:
            return f"vision_config.{problem}"
        return decoder.unsupported_field(hf, ("language_model_only", False))

    def transformer_config(self, hf: HfConfig) -> Json:
        """Returns the fields of megatron-core's TransformerConfig that define the model, except parallelism and
        dtype."""
        return self.text.transformer_config(self._text(hf))

    def gpt_arguments(self, hf: HfConfig) -> Json:
        """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
        return self.text.gpt_arguments(self._text(hf))

    def mtp_layers(self, hf: HfConfig) -> int:
        """Returns the number of multi-token prediction layers that the checkpoint declares."""
        return self.text.mtp_layers(self._text(hf))

    def layer_kind(self, hf: HfConfig) -> LayerKind:
        """Returns the kind of the decoder's layers, with the parameters of the vision tower."""
        return WithTower(rows=self.tower.rows(self._vision(hf)))

    def weight_table(self, hf: HfConfig, mtp: int = 0) -> Table:
        """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
        contains. `mtp`: number of multi-token prediction layers to train."""
        table = self.text.weight_table(self._text(hf), mtp)
        return self._with_tower(table, self.tower.rows(self._vision(hf)))

    def engine_table(self, hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
        """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model. Raises SlimxError
        if SGLang would build a different model from config.json `hf`."""
        table = self.text.engine_table(self._text(hf), fused_shared_experts=fused_shared_experts)
        return self._with_tower(table, self.tower.engine_rows(self._vision(hf)))

    def bridge_tower(self, hf: HfConfig) -> dict[str, Row]:
        """Implements `slimx.extras.megatron_files.bridge.BridgeFamily`."""
        vision = self._vision(hf)
        rows = zip(self.tower.rows(vision), self.tower.bridge_rows(vision), strict=True)
        return {row.name: stored for row, stored in rows}

    def with_images(self, spec: ModelSpec, config: Config) -> ModelSpec:
        """Returns `spec`, a model of this family, with a vision tower that computes embeddings of images, as section
        `trainer.vision` of `config` configures it."""
        assert config.trainer.vision is not None and isinstance(spec.layer_kind, WithTower)
        train = config.trainer.vision.train
        frozen: list[str] = []
        for row in spec.layer_kind.rows:
            if train == "none" or (train == "projector" and not row.name.startswith(self.tower.PROJECTOR)):
                frozen.append(row.name)
        tower = self._tower(spec.hf)
        inputs = ImageInputs(tower, train, config.images, self._costs(spec, config, tower.levels))
        return replace(spec, layer_kind=replace(spec.layer_kind, inputs=inputs), untrained=frozen)

    def _costs(self, spec: ModelSpec, config: Config, levels: int) -> TowerCosts:
        vision = config.trainer.vision
        assert vision is not None and isinstance(spec.layer_kind, WithTower)
        rollout = config.rollout
        fields = self._vision(spec.hf)
        area = fields["patch_size"] ** 2
        return TowerCosts(
            vision=fields,
            rows=spec.layer_kind.rows,
            projector=self.tower.PROJECTOR,
            levels=levels,
            train=vision.train,
            hidden=spec.transformer["hidden_size"],
            prompt=rollout.max_prompt_tokens if config.served.policy else None,
            prompts=rollout.prompts_per_step,
            image=None if vision.max_pixels is None else vision.max_pixels // area,
        )

    def _with_tower(self, table: Table, rows: tuple[Row, ...]) -> Table:
        if self.nested:
            return nested_table(table, rows, self.stack)
        return replace(table, rows=(*table.rows, *rows))

    def _text(self, hf: HfConfig) -> HfConfig:
        return text_config(hf, self.fixed, flat=not self.nested)

    def _vision(self, hf: HfConfig) -> HfConfig:
        """Returns the fields of the vision tower, by the names of Qwen3-VL's vision_config where both have a field."""
        vision: HfConfig = hf["vision_config"]
        return vision

    def _unsupported_text(self, text: HfConfig) -> str | None:
        """Returns `unsupported` of the language model, whose fields are `text`."""
        return self.text.unsupported(text)

    def _tower(self, hf: HfConfig) -> Tower:
        vision = self._vision(hf)
        return Tower(
            module=self.module,
            fields=vision,
            merge=vision["spatial_merge_size"],
            axes=None if self.default_sections is None else self._axes(hf, self.default_sections),
            levels=len(vision.get("deepstack_visual_indexes") or ()),
        )

    def _axes(self, hf: HfConfig, default: tuple[int, int, int]) -> tuple[int, ...]:
        text = self._text(hf)
        sections = decoder.rotary(text)[1].get("mrope_section") or default
        rotated = self.transformer_config(hf)["kv_channels"]
        rotated *= decoder.rotary_fraction(text, default=self.rotary_fraction)
        return rotary_axes(int(rotated) // 2, sections, interleaved=self.interleaved)
