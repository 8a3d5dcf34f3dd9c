"""GPT model that outputs log-probs instead of logits, and multi-token prediction (MTP) layers that can be recomputed
with packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    roll_tensor,
)

from slimx.numerics.mode import Head
from slimx.trainer.model.logprobs import Targets, chunk_tokens, label_logprobs


class PolicyOutput:
    """Mixin that makes a megatron-core model return log-probs instead of logits.

    megatron-core's models return logits, or, if labels are given, the labels' losses. A model with this mixin takes
    `Targets` as labels and returns the results of `label_logprobs`: log-probs and entropies, fp32 [T], and the
    log-probs of `Targets.top`. Logits exist only for one chunk of tokens at a time (`slimx.trainer.model.logprobs`). If
    the model has MTP layers, a `loss_mask` adds their loss to the backward pass. Without labels, the model returns all
    logits [1, T, V / TP], as megatron-core's models do."""

    config: TransformerConfig
    cp_group: torch.distributed.ProcessGroup
    embedding: torch.nn.Module
    mtp: Callable[..., torch.Tensor]
    mtp_process: bool
    output_layer: torch.nn.Module
    pg_collection: ProcessGroupCollection
    post_process: bool
    share_embeddings_and_output_weights: bool
    shared_embedding_or_output_weight: Callable[[], torch.Tensor]

    def __init__(
        self, *args: object, logprob_chunk_tokens: int | None = None, head: Head | None = None, **kwargs: object
    ):
        """Builds the model with megatron-core's arguments. `logprob_chunk_tokens`: number of tokens whose logits exist
        at the same time; default: see `chunk_tokens`. `head`: implements the arithmetic of the output layer; None for
        torch's."""
        super().__init__(*args, **kwargs)
        self._chunk = logprob_chunk_tokens
        self._head = head

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: Targets | None,
        rotary_pos_emb: object,
        rotary_pos_cos: object,
        rotary_pos_sin: object,
        loss_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: object,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Computes the outputs from the decoder's hidden states, on the last pipeline stage; other stages return the
        hidden states. `loss_mask` [1, T]: weight of each label in the loss of the MTP layers (0: not trained)."""
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        head = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert isinstance(head, torch.Tensor)
        if labels is None:
            return self.output_layer(hidden_states, weight=head)[0].transpose(0, 1).contiguous()
        if self.mtp_process and loss_mask is not None:
            # The MTP layers are trained to predict what the policy samples, and must not change the policy: its hidden
            # states, embedding and output layer get no gradient from them. The input requires a gradient nevertheless,
            # which is not used, because recomputation keeps a layer's graph only if its input requires one.
            frozen = hidden_states.detach().requires_grad_(torch.is_grad_enabled())
            predicted = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=frozen,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                packed_seq_params=bounds_alone(packed_seq_params),
                embedding=lambda **inputs: self.embedding(**inputs).detach(),
            )
            shifted = labels.labels.unsqueeze(0)
            for states in predicted.chunk(1 + self.config.mtp_num_layers)[1:]:
                shifted, _ = roll_tensor(shifted, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
                loss_mask, _ = roll_tensor(loss_mask, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
                logprobs, _ = self._logprobs(states, head.detach(), Targets(labels=shifted[0]))
                scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
                hidden_states = MTPLossAutoScaler.apply(hidden_states, -scale * loss_mask[0] * logprobs)
        return self._logprobs(hidden_states, head, labels)

    def _logprobs(self, hidden_states: torch.Tensor, head: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, ...]:
        """Computes the results of `label_logprobs` from `hidden_states` [T, 1, h], or [T / TP, 1, h] with sequence
        parallelism, and the output layer's weight `head` [V / TP, h]."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            full = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            full = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        chunk = chunk_tokens(self._chunk, len(head))
        return label_logprobs(full.squeeze(1), head, targets, group=group, chunk=chunk, head=self._head)


def bounds_alone(sequences: PackedSeqParams | None) -> PackedSeqParams | None:
    """Returns a copy of `sequences` with only the bounds of the packed sequences, without the choices, such as selected
    tokens, that decoder layers have recorded in `sequences`. MTP layers must not replay these choices: none were
    recorded for MTP layers, which run only in training passes, and megatron-core numbers MTP layers from 1, so they
    would reuse the choices of decoder layers."""
    if sequences is None:
        return None
    return PackedSeqParams(**{field.name: getattr(sequences, field.name) for field in fields(PackedSeqParams)})


class PolicyModel(PolicyOutput, GPTModel):
    """GPTModel of megatron-core 0.19.2 that returns log-probs instead of logits, for training a policy."""


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's MTP layer with support for full recomputation even if several decoder layers are recomputed
    together, which megatron-core 0.19.2 does not allow for MTP layers."""

    def _checkpointed_forward(self, **inputs: object) -> torch.Tensor:
        if self.config.recompute_method == "block":
            # As in megatron-core, only the uniform method recomputes MTP layers.
            return self._proj_and_transformer_layer(**inputs)
        tensors = {}
        others = {}
        for name, value in inputs.items():
            if torch.is_tensor(value):
                tensors[name] = value
            else:
                others[name] = value

        def run(*values: torch.Tensor) -> torch.Tensor:
            return self._proj_and_transformer_layer(**dict(zip(tensors, values, strict=True)), **others)

        return checkpoint(run, self.config.distribute_saved_activations, *tensors.values())


def with_prediction_layers(
    block: MultiTokenPredictionBlockSubmodules | None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Changes the spec of an MTP block so that every layer is built as a PredictionLayer, and returns the spec. For a
    model without MTP layers, the spec is None and is returned unchanged."""
    if block is not None:
        for layer in block.layer_specs:
            layer.module = PredictionLayer
    return block
