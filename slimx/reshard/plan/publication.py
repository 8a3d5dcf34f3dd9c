"""Compiles a run's plans for publication and export from its configuration, before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.layout.engine import EngineLayout
from slimx.layout.form import form_of
from slimx.layout.kernels import PLAIN
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision, published_format
from slimx.layout.parts import Part
from slimx.layout.ranks import Sizes, engine_sizes
from slimx.layout.table import Table, checkpoint_parts
from slimx.models.families import ModelSpec
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan, compile_plan

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """Plan that every publication of a run follows to copy weights from trainer ranks to engines."""

    plan: Plan
    encoding: Encoding
    note: str
    """Phrase that describes the encoding and the reason for choosing it, for messages and `slimx plan`."""
    adapters: Plan | None = None
    """Plan for publications that send only LoRA adapters to engines that already have the base weights
    (`publish.adapters`); None if every publication sends all weights."""


def publication_plan(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> PublicationPlan | None:
    """Returns the plan for copying weights from trainers with the parallel sizes `sizes` to the configured engines on
    `device`, "cpu" or "cuda"; None if the run has no engines.

    Raises SlimxError if the weights cannot be published. If the sizes split quantization blocks, the message names the
    nearest sizes that do not split any."""
    if not config.served.policy:
        return None
    try:
        return _planned(config, spec, sizes, device)
    except SlimxError as error:
        if error.code != "plan.blocks":
            raise
        for words, near, near_sizes in published_format(config.publish.quantize).nearest(config, sizes):
            try:
                _planned(near, spec, near_sizes, device)
            except SlimxError:
                continue
            raise SlimxError(f"{error}, for example {words}", code=error.code, about=error.about) from error
        raise SlimxError(
            f"{error} (changing a single size is not enough), or remove publish.quantize to publish "
            f"in {config.numerics.dtype}",
            code=error.code,
            about=error.about,
        ) from error


def _planned(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> PublicationPlan:
    quantize = config.publish.quantize
    number_format = published_format(quantize)
    if config.publish.on_device and device == "cpu":
        raise SlimxError(
            f"publish.transport={config.publish.transport} copies weights from GPU to GPU, but this run uses the CPU "
            "(cluster.device); set publish.transport to memory, nixl or disk",
            code="publish.transport_on_cpu",
            about="publish.transport",
        )
    _check_served(config, spec, device)
    encoding, note = _encoding(config, spec, device)
    table = spec.table
    if encoding == "hf":
        separate = spec.family.separate_experts
        if separate:
            table = separate(table)
        if table.transposed():
            raise SlimxError(
                f"{spec.path} stores experts transposed and can be published only in the engines' layout "
                f"(publish.encoding=local), but weights would be published with {note}; change that setting",
                code="publish.transposed",
                about="publish.encoding",
            )
    _check_drafts(config, spec, encoding, note)
    if encoding == "hf" and quantize and (config.exact or number_format.LOCAL):
        mode = " in exact mode" if config.exact else ""
        raise SlimxError(
            f"publish.quantize={quantize}{mode} requires the engines' layout (publish.encoding=local), but "
            f"weights would be published with {note}; change that setting, or remove publish.quantize",
            code=f"publish.{'exact' if config.exact else quantize}_encoding",
            about="publish.quantize",
        )
    if encoding == "local":
        group = config.served.policy[0]
        engine = engine_sizes(group)
        fused = bool(group.sglang.get("enforce_shared_experts_fusion"))
        served = number_format.chosen(
            spec.engine_table(fused_shared_experts=fused, draft=config.publishes_draft(group))
        )
        target = EngineLayout(served, engine).parts()
        ranks = engine.world
    else:
        served = spec.engine_table()
        # SGLang splits experts evenly, regardless of the names of their weights.
        for group in config.served.policy:
            tuple(EngineLayout(served, engine_sizes(group)).shards())  # raises SlimxError for heads that do not divide
        target = _alternating(checkpoint_parts(table, mtp=False, served=served), MegatronLayout(table, sizes).parts())
        ranks = 1

    def compiled(source: Iterable[Part], target: Iterable[Part]) -> Plan:
        quantization = None if quantize is None else number_format.quantization(quantize)
        precision = Precision(config.numerics.dtype, config.numerics.dtype, quantization)
        return compile_plan(
            source, target, precision=precision, bucket_bytes=int(config.publish.bucket_mib * MIB), ranks=ranks
        )

    added, loaded = form_of(config).published_parts(table, sizes)
    adapters = compiled(added, loaded) if added else None
    plan = compiled(chain(MegatronLayout(table, sizes).parts(), added), chain(target, loaded))
    unread = set(plan.unread) - _predicting(table)
    if unread:
        raise SlimxError(
            f"no engine loads the trainer's tensor {min(unread)} (unloaded tensors: {len(unread)}); add a "
            "row for this tensor to the engine table of the model's family",
        )
    return PublicationPlan(plan, encoding, note, adapters)


def _alternating(target: Iterable[Part], source: Iterable[Part]) -> Iterator[Part]:
    """Yields `target` in an order in which tensors of different trainer ranks alternate, so that many ranks have a
    share of each bucket. Tensors of the same rank stay in order."""
    holder: dict[str, int] = {}
    for part in source:
        holder |= dict.fromkeys(part.sources, part.ranks[0])
    by_holder: dict[int | None, list[Part]] = {}
    for part in target:
        by_holder.setdefault(holder.get(part.sources[0]), []).append(part)
    places: list[tuple[float, int, Part]] = []
    for parts in by_holder.values():
        for index, part in enumerate(parts):
            places.append(((index + 0.5) / len(parts), len(places), part))
    return map(itemgetter(2), sorted(places))


def _check_served(config: Config, spec: ModelSpec, device: str) -> None:
    """Raises SlimxError if the model or an engine argument makes SGLang use a weight layout other than
    `ModelSpec.engine_table`, or prevents SGLang from serving the model."""
    if device == "cpu" and spec.no_cpu_engine:
        raise SlimxError(
            f"SGLang 0.5.23 cannot serve {spec.path} ({spec.family.ARCHITECTURE}) on the CPU ({spec.no_cpu_engine}); "
            "train the model without engines (algorithm.name=sft), or use GPUs",
            code="publish.no_cpu_engine",
            about=spec.family.ARCHITECTURE,
        )
    for group in config.served.policy:
        for key, value in spec.engine_arguments.items():
            if group.sglang.get(key) != value:
                raise SlimxError(
                    f"sglang.{key} of {group.where} is {group.sglang.get(key)!r}, but slimx "
                    f"does not support the weight layout of {spec.family.ARCHITECTURE} that results; choose {value!r}",
                    code="publish.engine_argument",
                    about=f"{group.key}.sglang.{key}",
                )
        unfused = spec.unfused(cpu=device == "cpu", expert=group.expert)
        if unfused is not None and group.sglang.get("enforce_shared_experts_fusion"):
            raise SlimxError(
                f"sglang.enforce_shared_experts_fusion of {group.where} has no effect, because "
                f"SGLang 0.5.23 never fuses the shared expert of {spec.family.ARCHITECTURE} {unfused}; remove this key",
                code="publish.unfused",
                about=f"{group.key}.sglang.enforce_shared_experts_fusion",
            )


def _check_drafts(config: Config, spec: ModelSpec, encoding: Encoding, note: str) -> None:
    """Raises SlimxError if engines use a multi-token prediction layer for speculative decoding, and this layer is
    trained but cannot be published with `encoding`."""
    for group in config.served.policy:
        if not config.publishes_draft(group):
            continue
        reason = f"weights are published under {note}" if encoding == "hf" else None
        if not spec.has_draft_table:
            reason = f"slimx does not know its layout in SGLang's draft model of {spec.family.ARCHITECTURE}"
        if reason is not None:
            raise SlimxError(
                f"{group.where} drafts tokens with the multi-token prediction layer that "
                f"trainer.megatron.mtp_num_layers trains, but the layer cannot be published ({reason}); remove "
                "the group's sglang.speculative_algorithm or trainer.megatron.mtp_num_layers",
                code="publish.draft",
                about=f"{group.key}.sglang.speculative_algorithm",
            )


def export_plan(config: Config, spec: ModelSpec, sizes: Sizes) -> Plan:
    """Returns the plan that exports the whole model as a Hugging Face checkpoint in the trainer's dtype."""
    return compile_plan(
        MegatronLayout(spec.table, sizes).parts(),
        checkpoint_parts(spec.table),
        precision=Precision(config.numerics.dtype, config.numerics.dtype),
        bucket_bytes=int(config.publish.bucket_mib * MIB),
    )


def _predicting(table: Table) -> set[str]:
    """Returns the names of the checkpoint tensors of multi-token prediction layers, which engines load only for
    speculative decoding."""
    names: set[str] = set()
    for entry in table.entries():
        if entry.row.stage == "mtp":
            names.update(entry.sources)
    return names


def _encoding(config: Config, spec: ModelSpec, device: str) -> tuple[Encoding, str]:
    encoding = config.publish.encoding
    if encoding == "hf":
        return "hf", "Hugging Face names, because publish.encoding is hf"
    if config.serves_adapters:  # the configuration's rules have refused "local"
        return "hf", "Hugging Face names, because adapters are sent with PEFT's names (publish.adapters)"
    reason = _not_local(config, spec)
    if reason is None and device == "cpu":
        reason = _padded_on_cpu(config, spec)
    if reason is None:
        return "local", "each engine rank receives its own bytes"
    if encoding == "local":
        raise SlimxError(
            f"publish.encoding=local is not possible, because {reason}; set publish.encoding to auto or hf",
        )
    return "hf", f"Hugging Face names, because {reason}"


def _not_local(config: Config, spec: ModelSpec) -> str | None:
    """Returns the reason why weights cannot be written in the engines' own layout, or None if they can."""
    groups = config.served.policy
    layouts = {(engine_sizes(g), bool(g.sglang.get("enforce_shared_experts_fusion")), g.drafts) for g in groups}
    if len(layouts) > 1:
        return "engine groups have different layouts, which would need separate plans"
    for group in groups:
        for key, reason in _UNKNOWN_LAYOUTS.items():
            if group.sglang.get(key) not in (None, False, PLAIN.get(key), spec.engine_arguments.get(key)):
                return f"sglang.{key} of {group.where} is set: {reason}"
    return None


def _padded_on_cpu(config: Config, spec: ModelSpec) -> str | None:
    """Returns the reason why SGLang's CPU path would pad the weights, or None if it would not.

    The CPU path pads numbers of heads and inner sizes that are not divisible by the number of ranks. On GPUs, SGLang
    repeats such heads or rejects the sizes instead."""
    engine = engine_sizes(config.served.policy[0])
    model = spec.transformer
    if model["num_query_groups"] % engine.attention_tensor:
        return (
            f"the model's {model['num_query_groups']} query groups are not divisible by the {engine.attention_tensor} "
            "ranks of an engine's attention (rollout.engines.tensor / dp_attention), so SGLang pads them on the CPU"
        )
    inner = {"an expert": model["moe_ffn_hidden_size"]} if spec.experts else {}
    shared = model.get("moe_shared_expert_intermediate_size")
    if shared:
        inner["a shared expert"] = shared
    if len(spec.moe_layers) < model["num_layers"]:
        inner["a dense MLP"] = model["ffn_hidden_size"]
    for module, columns in inner.items():
        # SGLang pads them even if it does not split them, as experts with full expert parallelism.
        if columns % (32 * engine.tensor):
            return (
                f"the {columns} columns of {module} are not divisible by 32 x {engine.tensor} ranks, so SGLang pads "
                "them on the CPU"
            )
    return None


_UNKNOWN_LAYOUTS = {
    "enable_eplb": "experts move between ranks while the engine runs",
    "init_expert_location": "experts are reordered",
    "quantization": "the engine repacks quantized weights after loading",
    "moe_a2a_backend": "its kernels may use a different weight layout",
    "moe_runner_backend": "its kernels may use a different weight layout",
    "enable_dp_lm_head": "the output layer is split over the attention's ranks",
    "moe_dense_tp_size": "dense layers are split over fewer ranks",
    "moe_dp_size": "experts are split over fewer ranks",
    "attn_cp_size": "attention is split over fewer ranks",
    "dcp_size": "attention is split over fewer ranks",
    "kt_method": "another library holds the experts",
    "torchao_config": "the engine quantizes weights after loading",
    "modelopt_quant": "the engine quantizes weights after loading",
}
"""Field of SGLang's ServerArgs that changes where or how weights are stored -> the reason why slimx does not know the
resulting layout."""
