"""Registry of model families, and what slimx needs to know about a Hugging Face directory's model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.run import Model
from slimx.dotted import load_module
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.patterns import Sources, select
from slimx.layout.table import Row, Table
from slimx.models.fields import HfConfig, TrackedFields
from slimx.models.files.index import check_downloaded, read_object
from slimx.models.layer_kind import LayerKind
from slimx.models.schema import check_fields


class FamilyOptions(Protocol):
    """Names that a family's file may define, with their defaults."""

    UNTRAINED: Sequence[str] = ()
    """Globs of parameters that no loss reaches."""
    UNCHECKED_FIELDS: Collection[str] = ()
    """Fields of config.json whose types and bounds differ from those of `slimx.models.schema`."""
    ENGINE_ARGUMENTS: Mapping[str, object] = MappingProxyType({})
    """Fields of SGLang's ServerArgs that `engine_table` requires."""
    NO_CPU_ENGINE: str | None = None
    """The reason why SGLang cannot serve the family on the CPU."""
    FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM: bool = False
    """True if SGLang ignores requests to fuse shared experts on the CPU and under expert parallelism."""
    draft_rows: Callable[..., tuple[Row, ...]] | None = None
    """Function of `hf` and `fused_shared_experts`: SGLang's layout of the multi-token prediction layer in its draft
    model."""


class Family(FamilyOptions, Protocol):
    """Names that a family's file must define. `hf` is the content of config.json; a missing field raises KeyError.

    Fields that none of these functions except `engine_table` reads by name are refused (`slimx.models.fields`)."""

    ARCHITECTURE: str
    """The name in `architectures` of config.json."""

    def unsupported(self, hf: HfConfig) -> str | None:
        """Returns the part of config.json `hf` that cannot be built, beginning with the field's name; None if
        everything can."""
        ...

    def transformer_config(self, hf: HfConfig) -> Json:
        """Returns the fields of megatron-core's TransformerConfig (with `multi_latent_attention`: MLATransformerConfig)
        that define the model, without parallelism and dtype. A dense model has no `num_moe_experts`."""
        ...

    def gpt_arguments(self, hf: HfConfig) -> Json:
        """Returns arguments of megatron-core's GPTModel."""
        ...

    def mtp_layers(self, hf: HfConfig) -> int:
        """Returns the number of multi-token prediction layers that the checkpoint declares."""
        ...

    def layer_kind(self, hf: HfConfig) -> LayerKind:
        """Returns the parts of the decoder's layers (`slimx.models.layer_kind`)."""
        ...

    def engine_table(self, hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
        """Returns SGLang's layout of every checkpoint tensor. `fused_shared_experts`: shared experts follow the routed
        ones in the same tensors."""
        ...

    def weight_table(self, hf: HfConfig, mtp: int = 0) -> Table:
        """Returns the trainer's layout of every checkpoint tensor. `mtp`: multi-token prediction layers that are
        trained; further ones are frozen."""
        ...


GROUP = "slimx.families"
"""Group of the entry points of families, named by architecture."""

_VISION = (
    "slimx trains text alone and would lose the tensors of its vision tower; the same language model saved as "
    "Qwen3_5ForCausalLM or Qwen3_5MoeForCausalLM can be trained"
)
UNBUILDABLE: dict[str, str] = {
    "Qwen3_5ForConditionalGeneration": _VISION,
    "Qwen3_5MoeForConditionalGeneration": _VISION,
}
"""Architecture -> why slimx and megatron-core 0.19.2 cannot build it, as the end of "... is not supported: "."""

OUTPUT_LAYER = "output_layer.weight"
"""Name of the output layer in every family's table (megatron-core's)."""
SCORE = "score.weight"
"""Name of a reward model's head in transformers and SGLang, which a checkpoint may hold instead of the output layer."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as described by config.json, before any tensor is read."""

    path: str
    hf: Json
    transformer: Json
    """Fields of megatron-core's TransformerConfig."""
    gpt: Json
    """Arguments of megatron-core's GPTModel or HybridModel."""
    layer_kind: LayerKind
    table: Table
    """The trainer's layout of every checkpoint tensor."""
    family: Family

    @property
    def vocab_size(self) -> int:
        return self.gpt["vocab_size"]

    @property
    def prediction_layers(self) -> int:
        """Multi-token prediction layers that config.json declares; `table` has those that are trained."""
        return self.family.mtp_layers(self.hf)

    @property
    def experts(self) -> int:
        """Routed experts of a MoE layer; 0 for a dense model."""
        return self.table.experts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of layers with experts; empty for a dense model."""
        if not self.experts:
            return ()
        layers = self.layer_kind.layers(self.transformer)
        return tuple(index for index, layer in enumerate(layers) if layer.mlp == "experts")

    @property
    def normalizes_projections(self) -> bool:
        """True if queries and keys are normalized over all heads together; the norms are then split as the heads
        are."""
        return any(row.name.endswith("self_attention.q_layernorm.weight") and row.axis == 0 for row in self.table.rows)

    def frozen(self, patterns: Sequence[str]) -> frozenset[Sources]:
        """Returns the parameters that are not trained, in the form of `select`: those matching `patterns`
        (`trainer.freeze`) and the family's UNTRAINED."""
        configured = select(self.table, patterns, "trainer.freeze")
        return configured | select(self.table, self.family.UNTRAINED, "UNTRAINED")

    @property
    def engine_arguments(self) -> Mapping[str, object]:
        """Fields of SGLang's ServerArgs that `engine_table` requires."""
        return self.family.ENGINE_ARGUMENTS

    @property
    def no_cpu_engine(self) -> str | None:
        """The reason why SGLang cannot serve the model on the CPU; None if it can."""
        return self.family.NO_CPU_ENGINE

    def unfused(self, *, cpu: bool, expert: int) -> str | None:
        """Returns the reason why SGLang ignores a request to fuse shared experts, in an engine of expert parallel size
        `expert`; None if it fuses them."""
        if not self.family.FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM:
            return None
        if cpu:
            return "on the CPU"
        return f"with expert parallelism ({expert})" if expert > 1 else None

    @property
    def has_draft_table(self) -> bool:
        """True if SGLang's layout of the only multi-token prediction layer in its draft model is known."""
        return self.family.draft_rows is not None and self.prediction_layers == 1

    def engine_table(self, *, fused_shared_experts: bool = False, draft: bool = False) -> Table:
        """Returns SGLang's layout of every checkpoint tensor; with `draft` also that of its draft model."""
        table = self.family.engine_table(self.hf, fused_shared_experts=fused_shared_experts)
        if not draft:
            return table
        assert self.family.draft_rows is not None
        rows = self.family.draft_rows(self.hf, fused_shared_experts=fused_shared_experts)
        return replace(table, rows=(*table.rows, *rows), mtp_layers=1)

    def without_output_layer(self) -> ModelSpec:
        """Returns the model without its output layer, as value and reward models have it. A checkpoint may still hold
        that tensor, or a reward model's head."""
        table = self.table
        shapes = table.checkpoint_shapes()
        rows: list[Row] = []
        unused: dict[str, tuple[int, ...]] = {}
        for row in table.rows:
            if row.name == OUTPUT_LAYER:
                unused.update(row.sources)
            else:
                # The second copy of a tied embedding is the output layer.
                copies = tuple(copy for copy in row.copies if copy[1] != OUTPUT_LAYER)
                rows.append(replace(row, copies=copies))
        aliases: dict[str, str] = {}
        for name, original in table.aliases.items():
            if original in unused:
                unused[name] = shapes[original]
            else:
                aliases[name] = original
        unused[SCORE] = (1, self.transformer["hidden_size"])
        return replace(
            self,
            table=replace(table, rows=tuple(rows), aliases=aliases, frozen={**table.frozen, **unused}),
            gpt={**self.gpt, "share_embeddings_and_output_weights": False},
        )


def load_family(path: str, key: str = "model.family") -> Family:
    """Returns the module with dotted path `path`, an external family. Raises SlimxError, naming `key`, if it cannot be
    imported or lacks a name of `Family`."""
    module = load_module(key, path)
    required = [name for name in (*Family.__annotations__, *vars(Family)) if not name.startswith("_")]
    missing = [name for name in required if not hasattr(module, name)]
    if missing:
        raise SlimxError(
            f"{key}: {path} does not define {', '.join(missing)}; docs/models.md lists what a family defines",
            code="model.family_part",
            about=missing[0],
        )
    return _with_defaults(module)


def _with_defaults(module: object) -> Family:
    """Returns a family's module with the default of each option that it does not define."""
    for name in FamilyOptions.__annotations__:
        if not hasattr(module, name):
            setattr(module, name, getattr(FamilyOptions, name))
    return cast(Family, module)


def configured_model(config: Config) -> ModelSpec:
    """Returns the model that the configuration trains: a policy, or the trunk of a reward model.

    Raises SlimxError as `read_model` does."""
    family = load_family(config.model.family) if config.model.family else None
    mtp = config.trainer.megatron.get("mtp_num_layers") or 0
    spec = read_model(config.model.path, mtp_layers=mtp, family=family)
    return spec.without_output_layer() if config.algorithm.scores else spec


def read_model(path: str | Path, *, mtp_layers: int = 0, family: Family | None = None) -> ModelSpec:
    """Reads `path`/config.json for a model with `mtp_layers` layers of multi-token prediction.

    `family`: None to choose by config.json's architecture. Raises SlimxError for a missing directory, an unknown
    family, a field that is invalid, unsupported or not read by the family, or more multi-token prediction layers than
    the checkpoint has."""
    file = Path(path) / "config.json"
    hf, architecture = _config_of(file)
    if not isinstance(mtp_layers, int) or mtp_layers < 0:
        raise SlimxError(
            f"trainer.megatron.mtp_num_layers={mtp_layers!r} is not a number of layers; set 0 or more",
            code="model.mtp_layers",
            about="trainer.megatron.mtp_num_layers",
        )
    family = _family_of(architecture, file, family)
    check_fields(hf, file, family.UNCHECKED_FIELDS)
    try:
        return _spec(str(path), hf, architecture, family, mtp_layers)
    except KeyError as error:
        raise SlimxError(
            f"{file}: field {error} is missing or null; a {architecture} checkpoint must have it",
            code="model.field_missing",
            about=str(error.args[0]),
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SlimxError(
            f"{file}: a field has an invalid value for a {architecture} ({error}); restore it from the "
            "checkpoint's source",
            code="model.field",
            about=str(file),
        ) from error


def _spec(path: str, hf: Json, architecture: str, family: Family, mtp_layers: int) -> ModelSpec:
    """Returns the model of a config.json. Raises SlimxError for unsupported and unread fields."""
    file = Path(path) / "config.json"
    fields = TrackedFields(hf)
    problem = family.unsupported(fields)
    if problem:
        raise SlimxError(
            f"{file}: {architecture} with {problem} is not supported",
            code="model.unsupported",
            about=problem.split()[0],
        )
    declared = family.mtp_layers(fields)
    if mtp_layers > declared:
        raise SlimxError(
            f"{file}: the checkpoint has {declared} MTP layers; lower trainer.megatron.mtp_num_layers={mtp_layers}",
            code="model.mtp_layers",
            about="trainer.megatron.mtp_num_layers",
        )
    table = family.weight_table(fields, mtp_layers)
    spec = ModelSpec(
        path=path,
        hf=hf,
        transformer=family.transformer_config(fields),
        gpt=family.gpt_arguments(fields),
        layer_kind=family.layer_kind(fields),
        table=table,
        family=family,
    )
    unread = next(fields.unread(), None)
    if unread is not None:
        raise SlimxError(
            f"{file}: slimx does not read field {unread} of a {architecture}, and it may change what the model "
            "computes; remove it if it has no effect, or set model.family to a family that reads it",
            code="model.field_unread",
            about=unread,
        )
    return spec


def read_trunk(model: Model) -> ModelSpec:
    """Returns the trunk of a policy's `model` for a value model: without multi-token prediction layers and output
    layer. A checkpoint may still hold their tensors."""
    family = load_family(model.family) if model.family else None
    return read_model(model.path, family=family).without_output_layer()


def _config_of(file: Path) -> tuple[Json, str]:
    """Returns content and architecture of a config.json."""
    check_downloaded(file.parent)
    if not file.is_file():
        problem = "not a checkpoint (config.json is missing)" if file.parent.exists() else "no such directory"
        siblings = {
            path.parent.name: path.parent for path in file.parent.parent.glob("*/config.json") if path.is_file()
        }
        near = get_close_matches(file.parent.name, siblings, n=1)
        hint = f"did you mean {siblings[near[0]]}?" if near else "give a Hugging Face model directory"
        raise SlimxError(
            f"{file.parent}: {problem}; {hint}",
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


def _family_of(architecture: str, file: Path, configured: Family | None) -> Family:
    if configured is not None:
        if architecture != configured.ARCHITECTURE:
            raise SlimxError(
                f"{file}: architecture {architecture} is not that of the family, {configured.ARCHITECTURE}; set "
                "model.family to the checkpoint's family, or leave it out",
                code="model.other_family",
                about=architecture,
            )
        return _with_defaults(configured)
    if architecture in UNBUILDABLE:
        raise SlimxError(
            f"{file}: architecture {architecture} is not supported: {UNBUILDABLE[architecture]}",
            code="model.unbuildable",
            about=architecture,
        )
    known = entry_points.find(GROUP)
    if architecture not in known:
        raise SlimxError(
            f"{file}: architecture {architecture} is not supported; slimx supports {', '.join(known)}, and "
            "docs/models.md shows how to add one (model.family)",
            code="model.unknown",
            about=architecture,
        )
    return _with_defaults(entry_points.load(GROUP, architecture))
