"""The plans of a run: what a publication and an export move, compiled from the configuration before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

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
    """The plan of every publication of a run."""

    plan: Plan
    encoding: Encoding
    note: str
    """Why this encoding."""
    adapters: Plan | None = None
    """The plan of publications that bring adapters alone, to engines that hold the base (`publish.adapters`); None:
    each brings all weights."""


def publication_plan(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> PublicationPlan | None:
    """The plan by which trainers of `sizes` fill the configured engines; None for a run without engines. Raises
    SlimxError, with the nearest sizes that fit where these cut blocks of fp8."""
    if not config.rollout.policy_engines:
        return None
    try:
        return _planned(config, spec, sizes, device)
    except SlimxError as error:
        if error.code != "plan.blocks":
            raise
        for words, near, near_sizes in published_format(config.publish.quantise).nearest(config, sizes):
            try:
                _planned(near, spec, near_sizes, device)
            except SlimxError:
                continue
            raise SlimxError(f"{error}; set {words}, which fits", code=error.code, about=error.about) from error
        raise SlimxError(
            f"{error}; no other size of engines or trainers alone fits: publish in {config.numerics.dtype} (leave "
            "publish.quantise out)",
            code=error.code,
            about=error.about,
        ) from error


def _planned(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> PublicationPlan:
    quantise = config.publish.quantise
    kept = published_format(quantise)
    if config.publish.on_device and device == "cpu":
        raise SlimxError(
            f"publish.transport={config.publish.transport} moves weights from GPU to GPU, and this run is on the CPU "
            "(cluster.device); set it to memory, nixl or disk",
            code="publish.transport_on_cpu",
            about="publish.transport",
        )
    _check_served(config, spec, device)
    encoding, note = _encoding(config, spec, device)
    if encoding == "hf" and (turned := spec.table.turned()):
        raise SlimxError(
            f"{note}, but {min(turned)} of {spec.path} holds experts transposed, which travel in the engines' own "
            "layout only; set publish.encoding=local and remove what rules it out",
            code="publish.transposed",
            about="publish.encoding",
        )
    _check_drafts(config, spec, encoding, note)
    if encoding == "hf" and quantise and (config.exact or kept.LOCAL):
        raise SlimxError(
            f"publish.quantise={quantise}{' in exact mode' if config.exact else ''} needs the engines' own "
            f"layout, and weights would travel under {note}; remove what rules it out",
            code=f"publish.{'exact' if config.exact else quantise}_encoding",
            about="publish.quantise",
        )
    if encoding == "local":
        group = config.rollout.policy_engines[0]
        engine = engine_sizes(group)
        fused = bool(group.sglang.get("enforce_shared_experts_fusion"))
        table = kept.chosen(spec.engine_table(fused_shared_experts=fused, draft=config.publishes_draft(group)))
        target, ranks = EngineLayout(table, engine).parts(), engine.world
    else:
        served = spec.engine_table()
        # SGLang splits experts evenly, whatever names their weights come under.
        for group in config.rollout.policy_engines:
            EngineLayout(served, engine_sizes(group))
        target, ranks = checkpoint_parts(spec.table, mtp=False, served=served), 1

    def compiled(source: Iterable[Part], target: Iterable[Part]) -> Plan:
        precision = Precision(config.numerics.dtype, config.numerics.dtype, kept.quantisation(quantise))
        return compile_plan(
            source, target, precision=precision, bucket_bytes=int(config.publish.bucket_mib * MIB), ranks=ranks
        )

    beside, taken = form_of(config).published_parts(spec.table, sizes)
    adapters = compiled(beside, taken) if beside else None
    plan = compiled(chain(MegatronLayout(spec.table, sizes).parts(), beside), chain(target, taken))
    unread = set(plan.unread) - _predicting(spec.table)
    if unread:
        raise SlimxError(
            f"plan: the trainer's {min(unread)} goes nowhere ({len(unread)} such tensors); the engine's table of this "
            "family lacks a row",
        )
    return PublicationPlan(plan, encoding, note, adapters)


def _check_served(config: Config, spec: ModelSpec, device: str) -> None:
    """Refuse a model or an engine's argument with which SGLang would not serve what `ModelSpec.engine_table` says."""
    if device == "cpu" and spec.no_cpu_engine:
        raise SlimxError(
            f"{spec.path}: SGLang 0.5.23 cannot serve {spec.family.ARCHITECTURE} on the CPU ({spec.no_cpu_engine}); "
            "train it without engines (algorithm.name=sft), or serve it on GPUs",
            code="publish.no_cpu_engine",
            about=spec.family.ARCHITECTURE,
        )
    for group in config.rollout.policy_engines:
        for key, value in spec.engine_arguments.items():
            if group.sglang.get(key) != value:
                raise SlimxError(
                    f"rollout.engines.sglang.{key} of engine {group.name} must be {value!r} for "
                    f"{spec.family.ARCHITECTURE}: SGLang would else hold weights in a layout that cannot be published",
                    code="publish.engine_argument",
                    about=f"rollout.engines.sglang.{key}",
                )
        where = spec.unfused(cpu=device == "cpu", expert=group.expert)
        if where is not None and group.sglang.get("enforce_shared_experts_fusion"):
            raise SlimxError(
                f"rollout.engines.sglang.enforce_shared_experts_fusion of engine {group.name}: SGLang 0.5.23 fuses no "
                f"shared expert of {spec.family.ARCHITECTURE} {where}, whatever is asked for; leave it out",
                code="publish.unfused",
                about="rollout.engines.sglang.enforce_shared_experts_fusion",
            )


def _check_drafts(config: Config, spec: ModelSpec, encoding: Encoding, note: str) -> None:
    """Refuse to train a layer of multi-token prediction by which engines draft, where it cannot be published."""
    for group in config.rollout.policy_engines:
        if not config.publishes_draft(group):
            continue
        why = f"weights travel under {note}" if encoding == "hf" else None
        if not spec.has_draft_table:
            why = f"slimx knows no place of it in SGLang's draft of {spec.family.ARCHITECTURE}"
        if why is not None:
            raise SlimxError(
                f"{group.where} drafts tokens by the layer of multi-token prediction that trainer.megatron."
                f"mtp_num_layers trains, and it cannot be published: {why}; leave out one of the two",
                code="publish.draft",
                about="rollout.engines.sglang.speculative_algorithm",
            )


def export_plan(config: Config, spec: ModelSpec, sizes: Sizes) -> Plan:
    """The plan that writes the whole model as a Hugging Face checkpoint, in the trainer's dtype."""
    return compile_plan(
        MegatronLayout(spec.table, sizes).parts(),
        checkpoint_parts(spec.table),
        precision=Precision(config.numerics.dtype, config.numerics.dtype),
        bucket_bytes=int(config.publish.bucket_mib * MIB),
    )


def _predicting(table: Table) -> set[str]:
    """Checkpoint tensors of the layers of multi-token prediction: without speculative decoding no engine holds them."""
    return {name for entry in table.entries() if entry.row.stage == "mtp" for name in entry.sources}


def _encoding(config: Config, spec: ModelSpec, device: str) -> tuple[Encoding, str]:
    wanted = config.publish.encoding
    if wanted == "hf":
        return "hf", "asked for by publish.encoding"
    if config.serves_adapters:  # rules refuse "local"
        return "hf", "Hugging Face names, beside which adapters have PEFT's (publish.adapters)"
    reason = _not_local(config, spec) or (_padded_on_cpu(config, spec) if device == "cpu" else None)
    if reason is None:
        return "local", "each engine rank receives its own bytes"
    if wanted == "local":
        raise SlimxError(
            f"publish.encoding is local, but {reason}; set it to auto or hf",
        )
    return "hf", f"Hugging Face names, because {reason}"


def _not_local(config: Config, spec: ModelSpec) -> str | None:
    """The reason for which the engines' own layout cannot be written; None if it can."""
    groups = config.rollout.policy_engines
    if len({(engine_sizes(g), bool(g.sglang.get("enforce_shared_experts_fusion")), g.drafts) for g in groups}) > 1:
        return "rollout.engines has groups of different layouts, which would need a plan each"
    for group in groups:
        for key, why in _UNKNOWN_LAYOUTS.items():
            if group.sglang.get(key) not in (None, False, PLAIN.get(key), spec.engine_arguments.get(key)):
                return f"rollout.engines.sglang.{key} is set: {why}"
    return None


def _padded_on_cpu(config: Config, spec: ModelSpec) -> str | None:
    """SGLang's CPU path pads heads and inner sizes that do not divide, where GPUs repeat or refuse them."""
    engine, model = engine_sizes(config.rollout.policy_engines[0]), spec.transformer
    if model["num_query_groups"] % engine.attention_tensor:
        return (
            f"the {engine.attention_tensor} ranks of an engine's attention (rollout.engines.tensor / dp_attention) do "
            f"not divide {model['num_query_groups']} query groups, which SGLang pads on the CPU"
        )
    inner = {"an expert": model["moe_ffn_hidden_size"]} if spec.experts else {}
    if shared := model.get("moe_shared_expert_intermediate_size"):
        inner["a shared expert"] = shared
    if len(spec.moe_layers) < model["num_layers"]:
        inner["a dense MLP"] = model["ffn_hidden_size"]
    for what, columns in inner.items():
        # Whether or not it splits them: experts are whole where expert parallelism takes all ranks.
        if columns % (32 * engine.tensor):
            return (
                f"{columns} columns of {what} are no multiple of 32 for each of {engine.tensor} ranks, to which SGLang "
                "pads them on the CPU"
            )
    return None


_UNKNOWN_LAYOUTS = {
    "enable_eplb": "experts move between ranks while the engine runs",
    "init_expert_location": "experts do not stand in their own order",
    "quantization": "the engine repacks quantised weights after loading",
    "moe_a2a_backend": "its kernels may keep weights in a layout of their own",
    "moe_runner_backend": "its kernels may keep weights in a layout of their own",
    "enable_dp_lm_head": "the output layer is split over the attention's ranks",
    "moe_dense_tp_size": "dense layers are split over fewer ranks",
    "moe_dp_size": "experts are split over fewer ranks",
    "attn_cp_size": "attention is split over fewer ranks",
    "dcp_size": "attention is split over fewer ranks",
    "kt_method": "experts are held by another library",
    "torchao_config": "the engine quantises weights after loading",
    "modelopt_quant": "the engine quantises weights after loading",
}
"""Fields of SGLang's ServerArgs that change where or how weights are held."""
