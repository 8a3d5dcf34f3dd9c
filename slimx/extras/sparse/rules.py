"""Configuration rules for sparse attention: limits of the indexer, of pipeline stages, and of replaying selected
tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.trainer import Trainer

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


def _is_sparse(spec: ModelSpec) -> bool:
    return spec.transformer.get("experimental_attention_variant") == "dsa"


@rule("sparse.indexer_loss", "trainer.megatron.dsa_indexer_loss_coeff")
def leaves_the_indexer(trainer: Trainer, spec: ModelSpec) -> Problems:
    if trainer.megatron.get("dsa_indexer_loss_coeff") and _is_sparse(spec):
        yield (
            f"trainer.megatron.dsa_indexer_loss_coeff would train the sparse-attention indexer of {spec.path}, but "
            "slimx keeps the weights of indexers unchanged; remove trainer.megatron.dsa_indexer_loss_coeff"
        )


@rule("sparse.shared_stage", "trainer.layers_per_stage")
def stages_begin_with_an_indexer(sizes: Sizes, spec: ModelSpec) -> Problems:
    if not _is_sparse(spec):
        return
    layers = spec.table.layers
    counts = sizes.split or (layers // sizes.stages,) * sizes.stages
    if sum(counts) != layers:
        return
    fitting = spec.layer_kind.stage_starts(layers)
    # Stages after the last layer are empty, so where they start does not matter.
    for layer in sorted({*accumulate(counts[:-1])} - {layers, *fitting}):
        yield (
            f"a pipeline stage starts with layer {layer} of {spec.path}, which reads the tokens selected in a layer "
            "of the previous stage; set trainer.layers_per_stage such that every stage starts with one of the layers "
            f"{', '.join(map(str, fitting))}, or lower trainer.pipeline or trainer.virtual_pipeline"
        )


@rule("sparse.replay", "trainer.indexer_replay")
def has_indexers(trainer: Trainer, spec: ModelSpec) -> Problems:
    if trainer.indexer_replay != "none" and not _is_sparse(spec):
        yield (
            f"trainer.indexer_replay is {trainer.indexer_replay}, but {spec.path} has no sparse attention whose "
            "selected tokens could be replayed; remove trainer.indexer_replay"
        )


@rule("sparse.engine_choice", "trainer.indexer_replay")
def chosen_by_engines(trainer: Trainer) -> Problems:
    # sglang.srt.layers.attention.dsa.dsa_topk_backend selects tokens and looks up the page table in one kernel, whose
    # result sglang.srt.state_capturer.indexer_topk reports.
    if trainer.indexer_replay == "R3":
        yield (
            "trainer.indexer_replay=R3 would replay the tokens that SGLang's indexers selected, but SGLang 0.5.23 "
            "reports these tokens as slots of the KV cache instead of positions; set trainer.indexer_replay to R2 or "
            "none"
        )
