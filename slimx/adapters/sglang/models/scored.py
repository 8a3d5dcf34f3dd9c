"""Reward-model classes for families that SGLang does not support as reward models, for checkpoints in the layout of
transformers' sequence classification.

Written for sglang 0.5.23, which has no reward model for Qwen3-MoE. Its class for Qwen3 gives the score head a bias that
no checkpoint contains and nothing initializes, so each start of a server would shift all scores by a different
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.layers.pooler import Pooler, PoolingType, score_and_pool
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

SCORE = "score.weight"


class _HeadConfig(Protocol):
    """The part of a transformers config that the score head needs."""

    hidden_size: int
    num_labels: int


if TYPE_CHECKING:

    class _Policy:
        """The part of SGLang's causal language model classes that `Scored` uses."""

        model: Callable[..., torch.Tensor]
        lm_head: torch.nn.Module
        logits_processor: torch.nn.Module

        def __init__(self, config: _HeadConfig, quant_config: object = None, prefix: str = "") -> None: ...

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...
else:
    _Policy = object


class Scored(_Policy):
    """Mixin for SGLang's causal language model classes that makes the model return a score computed at the last token
    instead of logits, as a reward model does."""

    def __init__(self, config: _HeadConfig, quant_config: object = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        del self.lm_head, self.logits_processor
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.pooler = Pooler(pooling_type=PoolingType.LAST, normalize=False)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: object,
        input_embeds: object = None,
        **_: object,
    ) -> object:
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        return score_and_pool(self.score, self.pooler, hidden, forward_batch, input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the score head and passes all other weights, except lm_head's, to the causal language model's
        loader."""

        def others() -> Iterable[tuple[str, torch.Tensor]]:
            for name, value in weights:
                if name == SCORE:
                    self.score.weight.data.copy_(value)
                elif not name.startswith("lm_head"):
                    yield name, value

        super().load_weights(others())


class Qwen3MoeForSequenceClassification(Scored, Qwen3MoeForCausalLM):
    """Reward model of the Qwen3-MoE family."""


class Qwen3ForSequenceClassification(Scored, Qwen3ForCausalLM):
    """Reward model of the Qwen3 family."""


EntryClass = [Qwen3MoeForSequenceClassification, Qwen3ForSequenceClassification]
