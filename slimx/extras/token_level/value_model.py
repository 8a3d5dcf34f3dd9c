"""GPT model that outputs one value per token: a policy's trunk with the head of a critic or a reward model."""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class ValueHead(torch.nn.Module):
    """Linear map from a hidden state to a scalar value, computed in fp32 whatever the dtype of the trunk: `weight`
    [1, hidden], `bias` [1] or None. It is replicated on every tensor-parallel rank."""

    IN_FP32 = True
    """Marker that makes `slimx.trainer.model.build` keep the module in fp32 in a half-precision model."""

    def __init__(self, config: TransformerConfig, *, bias: bool = True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32)) if bias else None
        for parameter in self.parameters():
            # With sequence parallelism each rank has a part of the tokens, so megatron-core must sum the gradients over
            # the ranks.
            parameter.__dict__["sequence_parallel"] = config.sequence_parallel

    @torch.no_grad()
    def reset(self, start: Literal["zero", "normal"], seed: int) -> None:
        """Sets the initial weights, which are equal on all ranks. `start`: "zero", or "normal" with standard deviation
        1 / sqrt(hidden + 1) (arXiv:2009.01325)."""
        hidden = self.weight.shape[1]
        initial = torch.zeros(1, hidden)
        if start == "normal":
            initial.normal_(0.0, (hidden + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
        self.weight.copy_(initial)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def load(self, weight: torch.Tensor) -> None:
        """Sets the head's weights to `weight` [1, hidden], the head of a reward model."""
        self.weight.copy_(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes values, fp32 [...], from hidden states [..., hidden]."""
        values = hidden.float() @ self.weight[0]
        return values if self.bias is None else values + self.bias


class ValueModel(GPTModel):
    """megatron-core's GPTModel with a `value_head` instead of its output layer, written for megatron-core 0.19.2."""

    BIAS = True
    """True if the value head has a bias."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object):
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            # GPTModel always creates one; it is removed before gradient buffers or an optimizer refer to it.
            del self.output_layer
            self.value_head = ValueHead(config, bias=self.BIAS)

    def _postprocess(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Computes values [1, T] from hidden states [T, 1, hidden], or with sequence parallelism from each rank's part
        of the hidden states. This method replaces GPTModel's method of the same name."""
        if not self.post_process:
            return hidden_states
        values = self.value_head(hidden_states)
        if self.config.sequence_parallel:
            # The loss is the same on all ranks, so in the backward pass each rank keeps the gradient of its local
            # tokens.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.transpose(0, 1).contiguous()

    def sharded_state_dict(self, *args: object, **kwargs: object) -> ShardedStateDict:
        """Returns the sharded state of the modules. GPTModel's method of this name expects an output layer, which this
        model lacks."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)
