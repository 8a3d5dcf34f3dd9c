"""Rules about models with sparse attention (DSA)."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.trainer import Trainer
from slimx.models.families import ModelSpec


@rule("sparse.indexer_loss", about="trainer.megatron.dsa_indexer_loss_coeff")
def leaves_the_indexer(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    given = trainer.megatron.get("dsa_indexer_loss_coeff")
    if given and spec.transformer.get("dsa_indexer_topk"):
        yield (
            f"trainer.megatron.dsa_indexer_loss_coeff={given}, but the indexer of {spec.path} is not trained: it stays "
            "as the checkpoint has it; leave the key out"
        )


@rule("sparse.replay", about="trainer.indexer_replay")
def has_indexers(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    if trainer.indexer_replay != "none" and not spec.transformer.get("dsa_indexer_topk"):
        yield (
            f"trainer.indexer_replay={trainer.indexer_replay} needs sparse attention, and {spec.path} has none; leave "
            "it at its default"
        )


@rule("sparse.engine_choice", about="trainer.indexer_replay")
def chosen_by_engines(trainer: Trainer) -> Iterator[str]:
    # sglang.srt.layers.attention.dsa.dsa_topk_backend chooses and looks up the page table in one kernel, and
    # sglang.srt.state_capturer.indexer_topk answers with what that gives.
    if trainer.indexer_replay == "R3":
        yield (
            "trainer.indexer_replay=R3, but SGLang 0.5.23 reports the tokens that an indexer chose as places in its "
            "KV cache, not as positions; set R2 or none"
        )
