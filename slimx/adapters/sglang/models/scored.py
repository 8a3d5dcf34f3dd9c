"""Reward models of the families that SGLang has no class for, in the layout of transformers' sequence classification.

Written for sglang 0.5.23, which has none for Qwen3-MoE; its own of Qwen3 gives the head a bias that no checkpoint has
and that nothing sets, so that each start of a server moves all scores by another constant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.pooler import Pooler, PoolingType, score_and_pool
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

SCORE = "score.weight"


class Scored:
    """Turns a policy's class into that of a reward model: the last token's score in the place of logits."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        del self.lm_head, self.logits_processor
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.pooler = Pooler(pooling_type=PoolingType.LAST, normalize=False)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, input_embeds: Any = None, **_: Any
    ) -> Any:
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        return score_and_pool(self.score, self.pooler, hidden, forward_batch, input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the head, and leave the rest to the policy's class."""

        def others() -> Iterable[tuple[str, torch.Tensor]]:
            for name, value in weights:
                if name == SCORE:
                    self.score.weight.data.copy_(value)
                elif not name.startswith("lm_head"):
                    yield name, value

        super().load_weights(others())


class Qwen3MoeForSequenceClassification(Scored, Qwen3MoeForCausalLM):
    """Qwen3-MoE with a score."""


class Qwen3ForSequenceClassification(Scored, Qwen3ForCausalLM):
    """Qwen3 with a score."""


EntryClass = [Qwen3MoeForSequenceClassification, Qwen3ForSequenceClassification]
