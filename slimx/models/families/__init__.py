"""The registry of model families, and what slimx needs to know of a Hugging Face directory's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.run import Model
from slimx.dotted import load_module
from slimx.errors import SlimxError
from slimx.layout.patterns import Sources, select
from slimx.layout.table import Table
from slimx.models.fields import Fields
from slimx.models.files.index import check_downloaded, read_object
from slimx.models.layer_kind import LayerKind
from slimx.models.schema import check_fields


class Family(Protocol):
    """The names that a family's file defines; `hf` is the content of config.json, and a missing field is a KeyError.

    A field that none of these functions but `engine_table` reads by its name is refused (`slimx.models.fields`)."""

    ARCHITECTURE: str
    """The name in config.json's `architectures`."""

    def unsupported(self, hf: dict[str, Any]) -> str | None:
        """Name the part of config.json `hf` that cannot be built, the field's name first; None if all can."""
        ...

    def transformer_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Fields of megatron-core's TransformerConfig (with `multi_latent_attention`: MLATransformerConfig) that define
        the model: no parallelism, no dtype. A dense model has no `num_moe_experts`."""
        ...

    def gpt_arguments(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Arguments of megatron-core's GPTModel."""
        ...

    def mtp_layers(self, hf: dict[str, Any]) -> int:
        """Layers of multi-token prediction that the checkpoint declares."""
        ...

    def layer_kind(self, hf: dict[str, Any]) -> LayerKind:
        """The parts of the decoder's layers (`slimx.models.layer_kind`)."""
        ...

    def engine_table(self, hf: dict[str, Any], *, fused_shared_experts: bool = False) -> Table:
        """SGLang's layout of every checkpoint tensor; `fused_shared_experts`: with shared experts after the others."""
        ...

    def weight_table(self, hf: dict[str, Any], mtp: int = 0) -> Table:
        """The trainer's layout of every checkpoint tensor, with `mtp` of those layers; the others are frozen."""
        ...


GROUP = "slimx.families"
"""Entry points of families, named by their architecture."""

_VISION = (
    "slimx trains text alone and would lose the tensors of its vision tower; the same language model saved as "
    "Qwen3_5ForCausalLM or Qwen3_5MoeForCausalLM can be trained"
)
UNBUILDABLE: dict[str, str] = {
    "Qwen3_5ForConditionalGeneration": _VISION,
    "Qwen3_5MoeForConditionalGeneration": _VISION,
}
"""Architecture -> what it lacks here and in megatron-core 0.19.2, as the end of "... is not supported: "."""

OUTPUT_LAYER = "output_layer.weight"
"""Name of the output layer in every family's table: megatron-core's."""
SCORE = "score.weight"
"""Name of a reward model's head in transformers and SGLang, which a checkpoint may hold in the place of it."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as read from config.json, before any tensor is touched."""

    path: str
    hf: dict[str, Any]
    transformer: dict[str, Any]
    """Fields of megatron-core's TransformerConfig."""
    gpt: dict[str, Any]
    """Arguments of megatron-core's GPTModel, or its HybridModel."""
    layer_kind: LayerKind
    table: Table
    """The trainer's layout of every checkpoint tensor."""
    family: Family

    @property
    def vocab_size(self) -> int:
        return self.gpt["vocab_size"]

    @property
    def prediction_layers(self) -> int:
        """Layers of multi-token prediction that config.json declares; `table` has those that are trained."""
        return self.family.mtp_layers(self.hf)

    @property
    def experts(self) -> int:
        """Routed experts of a MoE layer; 0: a dense model."""
        return self.table.experts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, counted from 0; none of a dense model."""
        layers = self.layer_kind.layers(self.transformer) if self.experts else ()
        return tuple(index for index, layer in enumerate(layers) if layer.mlp == "experts")

    @property
    def normalises_projections(self) -> bool:
        """True if queries and keys are normed over all heads together: the norms are then split as the heads are."""
        return any(row.name.endswith("self_attention.q_layernorm.weight") and row.axis == 0 for row in self.table.rows)

    def frozen(self, patterns: Sequence[str]) -> frozenset[Sources]:
        """Parameters that are not trained, as `select` names them: those that `patterns` (`trainer.freeze`) match, and
        those that no loss of the family reaches (its UNTRAINED, if it has any)."""
        given = select(self.table, patterns, "trainer.freeze")
        return given | select(self.table, getattr(self.family, "UNTRAINED", ()), "UNTRAINED")

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Fields of SGLang's ServerArgs that an engine must have for `engine_table` to hold (the family's
        ENGINE_ARGUMENTS, if it has any)."""
        return getattr(self.family, "ENGINE_ARGUMENTS", {})

    @property
    def no_cpu_engine(self) -> str | None:
        """The reason why SGLang cannot serve the model on the CPU (the family's NO_CPU_ENGINE); None if it can."""
        return getattr(self.family, "NO_CPU_ENGINE", None)

    def unfused(self, *, cpu: bool, expert: int) -> str | None:
        """The reason why SGLang leaves shared experts apart although it is asked to fuse them, in an engine of expert
        parallel size `expert`; None if it fuses them (see the family's FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM)."""
        if not getattr(self.family, "FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM", False):
            return None
        return "on the CPU" if cpu else f"with expert parallelism ({expert})" if expert > 1 else None

    @property
    def has_draft_table(self) -> bool:
        """True if it is known where SGLang's draft model holds the layer of multi-token prediction, the only one (the
        family's `draft_rows`, if it has them)."""
        return hasattr(self.family, "draft_rows") and self.prediction_layers == 1

    def engine_table(self, *, fused_shared_experts: bool = False, draft: bool = False) -> Table:
        """SGLang's layout of every checkpoint tensor; with `draft` also of what its draft model holds."""
        table = self.family.engine_table(self.hf, fused_shared_experts=fused_shared_experts)
        if not draft:
            return table
        rows = self.family.draft_rows(self.hf, fused_shared_experts=fused_shared_experts)
        return replace(table, rows=(*table.rows, *rows), mtp_layers=1)

    def without_output_layer(self) -> ModelSpec:
        """The model without its output layer, as value and reward models have it of a policy; a checkpoint may still
        hold the tensor, or that of a reward model's head."""
        table = self.table
        rows = tuple(
            # The second copy of a tied embedding is the output layer.
            replace(row, copies=tuple(copy for copy in row.copies if copy[1] != OUTPUT_LAYER))
            for row in table.rows
            if row.name != OUTPUT_LAYER
        )
        unused = {name: shape for row in table.rows if row.name == OUTPUT_LAYER for name, shape in row.sources}
        aliases = {name: original for name, original in table.aliases.items() if original not in unused}
        shapes = table.checkpoint_shapes()
        unused |= {name: shapes[original] for name, original in table.aliases.items() if original in unused}
        unused[SCORE] = (1, self.transformer["hidden_size"])
        return replace(
            self,
            table=replace(table, rows=rows, aliases=aliases, frozen={**table.frozen, **unused}),
            gpt={**self.gpt, "share_embeddings_and_output_weights": False},
        )


def load_family(path: str, key: str = "model.family") -> Family:
    """The module with dotted path `path`, a family that slimx does not bring. Raises SlimxError, naming `key`, if it
    cannot be imported or lacks a part of `Family`."""
    module = load_module(key, path)
    parts = [name for name in (*Family.__annotations__, *vars(Family)) if not name.startswith("_")]
    if missing := [name for name in parts if not hasattr(module, name)]:
        raise SlimxError(
            f"{key}: {path} lacks {', '.join(missing)}; docs/models.md says what a family defines",
            code="model.family_part",
            about=missing[0],
        )
    return module


def configured_model(config: Config) -> ModelSpec:
    """The trained model as the configuration wants it built: a policy, or the trunk of a reward model.

    Raises SlimxError as `read_model` does."""
    family = load_family(config.model.family) if config.model.family else None
    mtp = config.trainer.megatron.get("mtp_num_layers") or 0
    spec = read_model(config.model.path, mtp_layers=mtp, family=family)
    return spec.without_output_layer() if config.algorithm.scores else spec


def read_model(path: str | Path, *, mtp_layers: int = 0, family: Family | None = None) -> ModelSpec:
    """Read `path`/config.json, for a model with `mtp_layers` layers of multi-token prediction.

    `family`: None for the one that config.json's architecture belongs to. Raises SlimxError for a missing directory, an
    unknown family, a field with a value that no model has, that is unsupported or that no family reads, or layers
    that are not there."""
    file = Path(path) / "config.json"
    hf, architecture = _config_of(file)
    if not isinstance(mtp_layers, int) or mtp_layers < 0:
        raise SlimxError(
            f"trainer.megatron.mtp_num_layers={mtp_layers!r} is no number of layers; give 0 or more",
            code="model.mtp_layers",
            about="trainer.megatron.mtp_num_layers",
        )
    family = _family_of(architecture, file, family)
    check_fields(hf, file, getattr(family, "OWN_FIELDS", ()))
    try:
        fields = Fields(hf)
        problem = family.unsupported(fields)
        if problem:
            raise SlimxError(
                f"{file}: {architecture} with {problem} is not supported",
                code="model.unsupported",
                about=problem.split()[0],
            )
        if mtp_layers > (declared := family.mtp_layers(fields)):
            raise SlimxError(
                f"{file}: the checkpoint has {declared} MTP layers; lower trainer.megatron.mtp_num_layers={mtp_layers}",
                code="model.mtp_layers",
                about="trainer.megatron.mtp_num_layers",
            )
        table = family.weight_table(fields, mtp_layers)
        spec = ModelSpec(
            path=str(path),
            hf=hf,
            transformer=family.transformer_config(fields),
            gpt=family.gpt_arguments(fields),
            layer_kind=family.layer_kind(fields),
            table=table,
            family=family,
        )
        if name := next(fields.unread(), None):
            raise SlimxError(
                f"{file}: nothing in slimx reads field {name} of a {architecture}, and it may change what the model "
                "computes; remove it if it changes nothing, or give a family that reads it (model.family)",
                code="model.field_unread",
                about=name,
            )
        return spec
    except KeyError as error:
        raise SlimxError(
            f"{file}: field {error} is missing or null; a {architecture} checkpoint must have it",
            code="model.field_missing",
            about=str(error.args[0]),
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SlimxError(
            f"{file}: a field has a value that a {architecture} cannot have ({error}); restore it from the "
            "checkpoint's source",
            code="model.field",
            about=str(file),
        ) from error


def read_trunk(model: Model) -> ModelSpec:
    """The trunk of a policy's `model`, which a value model is made of: without layers of multi-token prediction and
    output layer; a checkpoint may still hold their tensors."""
    family = load_family(model.family) if model.family else None
    return read_model(model.path, family=family).without_output_layer()


def _config_of(file: Path) -> tuple[dict[str, Any], str]:
    """Content and architecture of a config.json."""
    check_downloaded(file.parent)
    if not file.is_file():
        lacking = "no checkpoint there (config.json is missing)" if file.parent.exists() else "no such directory"
        beside = {each.parent.name: each.parent for each in file.parent.parent.glob("*/config.json") if each.is_file()}
        near = get_close_matches(file.parent.name, beside, n=1)
        hint = f"did you mean {beside[near[0]]}?" if near else "give a Hugging Face model directory"
        raise SlimxError(
            f"{file.parent}: {lacking}; {hint}",
            code="model.directory",
            about=str(file.parent),
        )
    hf = read_object(file)
    names = hf.get("architectures") or ["nothing"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise SlimxError(
            f"{file}: architectures is {names!r}, not a list of names; restore it from the source",
            code="model.architectures",
            about=str(file),
        )
    return hf, names[0]


def _family_of(architecture: str, file: Path, given: Family | None) -> Family:
    if given is not None:
        if architecture != given.ARCHITECTURE:
            raise SlimxError(
                f"{file}: architecture {architecture} is not the family's, {given.ARCHITECTURE}; give the checkpoint's "
                "own family in model.family, or leave it out",
                code="model.other_family",
                about=architecture,
            )
        return given
    if architecture in UNBUILDABLE:
        raise SlimxError(
            f"{file}: architecture {architecture} is not supported: {UNBUILDABLE[architecture]}",
            code="model.unbuildable",
            about=architecture,
        )
    if architecture not in (known := entry_points.find(GROUP)):
        raise SlimxError(
            f"{file}: architecture {architecture} is not supported; slimx knows {', '.join(known)}, and "
            "docs/models.md shows how to add one (model.family)",
            code="model.unknown",
            about=architecture,
        )
    return entry_points.load(GROUP, architecture)
