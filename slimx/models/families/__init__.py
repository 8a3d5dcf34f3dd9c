"""Registry of model families, and `read_model`, which describes the model in a Hugging Face directory from its
config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.general import Model
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
    """Optional names that a family's module may define, with their defaults."""

    UNTRAINED: Sequence[str] = ()
    """Glob patterns of parameters that receive no gradient from any loss and are therefore frozen."""
    UNCHECKED_FIELDS: Collection[str] = ()
    """Fields of config.json that are exempt from the types and bounds of `slimx.models.schema`, because the family
    allows other values."""
    ENGINE_ARGUMENTS: Mapping[str, object] = MappingProxyType({})
    """Field of SGLang's ServerArgs -> the value that `engine_table` requires."""
    NO_CPU_ENGINE: str | None = None
    """Reason why SGLang cannot serve the family on the CPU; None if it can."""
    FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM: bool = False
    """True if SGLang fuses shared experts only on GPUs and without expert parallelism, and otherwise ignores requests
    to do so."""
    with_images: Callable[[ModelSpec, Config], ModelSpec] | None = None
    """Function (spec, config) that returns the model with a vision tower that computes embeddings of images, as section
    `trainer.vision` configures it; None: the model has no vision tower."""
    separate_experts: Callable[[Table], Table] | None = None
    """Function (table) that returns a weight table in which experts that the checkpoint stacks are separate tensors,
    with names that SGLang loads as well; None: SGLang loads only what the checkpoint contains."""
    draft_rows: Callable[..., tuple[Row, ...]] | None = None
    """Function (hf, *, fused_shared_experts) that returns the weight-table rows of the multi-token prediction layer in
    SGLang's draft model; None: slimx has no such rows."""


class Family(FamilyOptions, Protocol):
    """Names that a family's module must define, in addition to the optional ones of `FamilyOptions`. `hf`: contents of
    config.json; looking up a missing field raises KeyError.

    A field of config.json is refused if none of these functions, or only `engine_table`, reads it by name
    (`slimx.models.fields`)."""

    ARCHITECTURE: str
    """Name of the family in the field `architectures` of config.json."""

    def unsupported(self, hf: HfConfig) -> str | None:
        """Returns a description, beginning with the field's name, of the first setting in config.json `hf` that slimx
        does not support; None if slimx supports the model."""

    def transformer_config(self, hf: HfConfig) -> Json:
        """Returns the fields of megatron-core's TransformerConfig (with `multi_latent_attention`: MLATransformerConfig)
        that define the model, except parallelism and dtype. For a dense model, `num_moe_experts` is absent."""

    def gpt_arguments(self, hf: HfConfig) -> Json:
        """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""

    def mtp_layers(self, hf: HfConfig) -> int:
        """Returns the number of multi-token prediction layers that the checkpoint declares."""

    def layer_kind(self, hf: HfConfig) -> LayerKind:
        """Returns the kind of the decoder's layers, which describes what each layer computes
        (`slimx.models.layer_kind`)."""

    def engine_table(self, hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
        """Returns SGLang's weight table: for each parameter of the served model, the checkpoint tensors that it
        contains. `fused_shared_experts`: True if SGLang stores shared experts after the routed ones in the same
        parameters."""

    def weight_table(self, hf: HfConfig, mtp: int = 0) -> Table:
        """Returns the trainer's weight table: for each parameter of megatron-core's model, the checkpoint tensors that
        it contains. `mtp`: number of multi-token prediction layers to train; further layers are copied unchanged to
        exports."""


GROUP = "slimx.families"
"""Entry point group of family modules, each named after its architecture."""

OUTPUT_LAYER = "output_layer.weight"
"""Name of the output layer's weight in megatron-core, and of its row in every family's weight table."""
SCORE = "score.weight"
"""Name of a reward model's score head in transformers and SGLang; a checkpoint may contain it instead of the output
layer."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Description of a model, made from its config.json before any tensor is read."""

    path: str
    hf: Json
    transformer: Json
    """Fields of megatron-core's TransformerConfig that define the model."""
    gpt: Json
    """Result of the family's `gpt_arguments`."""
    layer_kind: LayerKind
    table: Table
    """The trainer's weight table."""
    family: Family
    untrained: Sequence[str]
    """Glob patterns of parameters that are frozen, whatever the configuration freezes."""

    @property
    def vocab_size(self) -> int:
        return self.gpt["vocab_size"]

    @property
    def prediction_layers(self) -> int:
        """Number of multi-token prediction layers in config.json; `table` contains only those that are trained."""
        return self.family.mtp_layers(self.hf)

    @property
    def experts(self) -> int:
        """Number of routed experts in an MoE layer; 0 for a dense model."""
        return self.table.experts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the MoE layers; empty for a dense model."""
        if not self.experts:
            return ()
        layers = self.layer_kind.layers(self.transformer)
        return tuple(index for index, layer in enumerate(layers) if layer.mlp == "experts")

    @property
    def normalizes_projections(self) -> bool:
        """True if queries and keys are each normalized over all heads together; TP then splits these norms' weights
        like the heads."""
        return any(row.name.endswith("self_attention.q_layernorm.weight") and row.axis == 0 for row in self.table.rows)

    def frozen(self, patterns: Sequence[str]) -> frozenset[Sources]:
        """Returns the parameters that are not trained, because they match `patterns` (`trainer.freeze`) or `untrained`.
        Each is identified by its checkpoint tensors, as in `select`."""
        configured = select(self.table, patterns, "trainer.freeze")
        return configured | select(self.table, self.untrained, "UNTRAINED")

    @property
    def engine_arguments(self) -> Mapping[str, object]:
        """Field of SGLang's ServerArgs -> the value that `engine_table` requires."""
        return self.family.ENGINE_ARGUMENTS

    @property
    def no_cpu_engine(self) -> str | None:
        """Reason why SGLang cannot serve the model on the CPU; None if it can."""
        return self.family.NO_CPU_ENGINE

    def unfused(self, *, cpu: bool, expert: int) -> str | None:
        """Returns the reason why an engine ignores a request to fuse shared experts, as a phrase for an error message
        ("on the CPU"); None if the engine fuses them. `cpu`: True if the engine runs on the CPU. `expert`:
        expert-parallel size."""
        if not self.family.FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM:
            return None
        if cpu:
            return "on the CPU"
        return f"with expert parallelism ({expert})" if expert > 1 else None

    @property
    def has_draft_table(self) -> bool:
        """True if the model has exactly one multi-token prediction layer and `draft_rows` describes it in SGLang's
        draft model."""
        return self.family.draft_rows is not None and self.prediction_layers == 1

    def engine_table(self, *, fused_shared_experts: bool = False, draft: bool = False) -> Table:
        """Returns SGLang's weight table for the model; with `draft`, the table includes the draft model's rows.
        `fused_shared_experts`: as in `Family.engine_table`."""
        table = self.family.engine_table(self.hf, fused_shared_experts=fused_shared_experts)
        if not draft:
            return table
        assert self.family.draft_rows is not None
        rows = self.family.draft_rows(self.hf, fused_shared_experts=fused_shared_experts)
        return replace(table, rows=(*table.rows, *rows), mtp_layers=1)

    def without_output_layer(self) -> ModelSpec:
        """Returns the same model without its output layer, for value and reward models. A checkpoint may still contain
        the output layer's tensor or a reward model's score head; trainers read neither."""
        table = self.table
        shapes = table.checkpoint_shapes()
        rows: list[Row] = []
        unused: dict[str, tuple[int, ...]] = {}
        for row in table.rows:
            if row.name == OUTPUT_LAYER:
                unused.update(row.sources)
            else:
                # A tied embedding's second copy is the output layer.
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
    """Imports an external family: the module with dotted path `path`. Raises SlimxError, which names the configuration
    key `key`, if the import fails or the module lacks a name of `Family`."""
    module = load_module(key, path)
    required = [name for name in (*Family.__annotations__, *vars(Family)) if not name.startswith("_")]
    missing = [name for name in required if not hasattr(module, name)]
    if missing:
        raise SlimxError(
            f"{key}: {path} does not define {', '.join(missing)}; define all names that docs/models.md lists for a "
            "family",
            code="model.family_part",
            about=missing[0],
        )
    return as_family(module)


def as_family(module: object) -> Family:
    """Sets each name of `FamilyOptions` that a family's module does not define to its default, and returns the
    module."""
    for name in FamilyOptions.__annotations__:
        if not hasattr(module, name):
            setattr(module, name, getattr(FamilyOptions, name))
    return cast(Family, module)


def configured_model(config: Config) -> ModelSpec:
    """Returns the model that a run with this configuration trains: a policy, or a reward model's trunk, which has no
    output layer.

    Raises SlimxError as `read_model` does."""
    family = load_family(config.model.family) if config.model.family else None
    mtp = config.trainer.megatron.get("mtp_num_layers") or 0
    spec = read_model(config.model.path, mtp_layers=mtp, family=family)
    if config.trainer.vision is not None:
        if spec.family.with_images is None:
            raise SlimxError(
                f"trainer.vision is set, but {config.model.path} has no vision tower that slimx can build; remove "
                "trainer.vision",
                code="model.no_vision",
                about="trainer.vision",
            )
        spec = spec.family.with_images(spec, config)
    return spec.without_output_layer() if config.algorithm.scores else spec


def read_model(path: str | Path, *, mtp_layers: int = 0, family: Family | None = None) -> ModelSpec:
    """Returns the model that `path`/config.json describes. `mtp_layers`: number of multi-token prediction layers to
    train.

    `family`: module that describes the model; None: chosen by config.json's architecture. Raises SlimxError if the
    directory is missing, the family is unknown, a field is invalid, unsupported or not read by the family, or the
    checkpoint has fewer multi-token prediction layers than `mtp_layers`."""
    file = Path(path) / "config.json"
    hf, architecture = _config_of(file)
    if not isinstance(mtp_layers, int) or mtp_layers < 0:
        raise SlimxError(
            f"trainer.megatron.mtp_num_layers is {mtp_layers!r}, not a number of layers; set an integer of at least 0",
            code="model.mtp_layers",
            about="trainer.megatron.mtp_num_layers",
        )
    family = _family_of(architecture, file, family)
    check_fields(hf, file, family.UNCHECKED_FIELDS)
    try:
        return _spec(str(path), hf, architecture, family, mtp_layers)
    except KeyError as error:
        raise SlimxError(
            f"{file}: field {error} has no value, but {architecture} requires one; restore the file from the "
            "checkpoint's source",
            code="model.field_missing",
            about=str(error.args[0]),
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SlimxError(
            f"{file}: the values in this file do not describe a valid model of architecture {architecture} "
            f"({error}); restore the file from the checkpoint's source",
            code="model.field",
            about=str(file),
        ) from error


def _spec(path: str, hf: Json, architecture: str, family: Family, mtp_layers: int) -> ModelSpec:
    """Returns the model that `hf`, the contents of config.json, describes. Raises SlimxError for unsupported fields,
    fields that the family does not read, and more `mtp_layers` than the checkpoint has."""
    file = Path(path) / "config.json"
    fields = TrackedFields(hf)
    problem = family.unsupported(fields)
    if problem:
        raise SlimxError(
            f"{file}: {architecture} with {problem} is not supported; choose another checkpoint",
            code="model.unsupported",
            about=problem.split()[0],
        )
    declared = family.mtp_layers(fields)
    if mtp_layers > declared:
        raise SlimxError(
            f"{file}: the checkpoint has {declared} multi-token prediction layers, fewer than "
            f"trainer.megatron.mtp_num_layers={mtp_layers}; lower trainer.megatron.mtp_num_layers",
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
        untrained=family.UNTRAINED,
    )
    unread = next(fields.unread(), None)
    if unread is not None:
        raise SlimxError(
            f"{file}: field {unread} may change the model, but slimx does not read this field of {architecture}; "
            "remove the field if it has no effect, or set model.family to a family that reads the field",
            code="model.field_unread",
            about=unread,
        )
    return spec


def read_trunk(model: Model) -> ModelSpec:
    """Returns the trunk of `model`, a policy's section of the configuration, for a value model: without output layer
    and without trained multi-token prediction layers. A checkpoint may still contain their tensors."""
    family = load_family(model.family) if model.family else None
    return read_model(model.path, family=family).without_output_layer()


def _config_of(file: Path) -> tuple[Json, str]:
    """Returns the contents of `file`, a config.json, and the architecture that it names. Raises SlimxError if the file
    is missing or invalid."""
    check_downloaded(file.parent)
    if not file.is_file():
        problem = (
            "the directory is not a checkpoint (config.json is missing)"
            if file.parent.exists()
            else "no such directory"
        )
        siblings = {
            path.parent.name: path.parent for path in file.parent.parent.glob("*/config.json") if path.is_file()
        }
        near = get_close_matches(file.parent.name, siblings, n=1)
        hint = f"did you mean {siblings[near[0]]}?" if near else "choose a Hugging Face model directory"
        raise SlimxError(f"{file.parent}: {problem}; {hint}", code="model.directory", about=str(file.parent))
    hf = read_object(file)
    names = hf.get("architectures") or ["nothing"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise SlimxError(
            f"{file}: architectures is {names!r}, but must be a list of names; restore the file from the checkpoint's "
            "source",
            code="model.architectures",
            about=str(file),
        )
    return hf, names[0]


def _family_of(architecture: str, file: Path, configured: Family | None) -> Family:
    if configured is not None:
        if architecture != configured.ARCHITECTURE:
            raise SlimxError(
                f"{file}: the architecture is {architecture}, but model.family is the family of "
                f"{configured.ARCHITECTURE}; set model.family to the checkpoint's family, or remove model.family",
                code="model.other_family",
                about=architecture,
            )
        return as_family(configured)
    known = entry_points.find(GROUP)
    if architecture not in known:
        raise SlimxError(
            f"{file}: architecture {architecture} is not supported; choose a checkpoint with one of the architectures "
            f"{', '.join(known)}, or set model.family to a family that you write as docs/models.md shows",
            code="model.unknown",
            about=architecture,
        )
    return as_family(entry_points.load(GROUP, architecture))
