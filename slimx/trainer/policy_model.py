"""The GPT model whose output is logits, also where it has layers of multi-token prediction (MTP)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor


class PolicyModel(GPTModel):
    """megatron-core's GPTModel for policy training.

    Upstream's wants labels wherever there are MTP layers, and returns losses instead of logits when it gets them. This
    one returns logits [1, T, vocab / TP] always; labels and weights only add the MTP loss to the backward pass.
    Written for megatron-core 0.16.1.
    """

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None,
        rotary_pos_emb: Any,
        rotary_pos_cos: Any,
        rotary_pos_sin: Any,
        loss_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """What follows the decoder; `loss_mask` [1, T] holds the weight of each label [1, T] (0: not trained)."""
        if not self.post_process:
            return hidden_states
        output = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.mtp_process and labels is not None:
            # The MTP layers learn to follow the policy and leave it alone: its hidden states, its embedding and its
            # output layer get no gradient from them. Recomputation keeps the graph of a layer only if its input wants a
            # gradient, so this one does, and nobody reads it.
            frozen = hidden_states.detach().requires_grad_(torch.is_grad_enabled())
            predicted = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=frozen,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                packed_seq_params=packed_seq_params,
                embedding=lambda **inputs: self.embedding(**inputs).detach(),
            )
            head = (self.output_layer.weight if output is None else output).detach()
            for states in predicted.chunk(1 + self.config.mtp_num_layers)[1:]:
                labels, _ = roll_tensor(labels, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
                loss_mask, _ = roll_tensor(loss_mask, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
                logits, _ = self.output_layer(states, weight=head)
                loss = loss_mask * self.compute_language_model_loss(labels, logits)
                scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
                hidden_states = MTPLossAutoScaler.apply(hidden_states, scale * loss)
        logits, _ = self.output_layer(hidden_states, weight=output)
        return logits.transpose(0, 1).contiguous()
