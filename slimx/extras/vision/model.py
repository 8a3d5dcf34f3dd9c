"""Language model of megatron-core that receives embeddings of images: its rotary positions, the vision tower, and the
features that the tower adds to the first decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import nn

from slimx.data.packing import zigzag
from slimx.data.records import Image
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.positions import packed_positions, placeholders
from slimx.extras.vision.tower import Tower

TOWER = "visual"
"""Name of the tower in the model's module."""


class SeenImages(Protocol):
    """Outputs of a vision tower in transformers."""

    pooler_output: torch.Tensor
    """Embeddings of all images, [N, h]."""
    deepstack_features: Sequence[torch.Tensor] | None


class VisionInputs:
    """Mixin that gives a GPTModel embeddings of images. `attach` must be called after construction.

    The ranks of the first pipeline stage compute the embeddings of a micro-batch's images, each image once, and replace
    those of the placeholder tokens. With tensor or context parallelism, all ranks of the stage compute all of them."""

    config: Any
    decoder: Any
    embedding: nn.Module
    pre_process: bool

    def attach(self, tower: Tower, store: ImageStore, *, train: str) -> None:
        """Adds the vision tower to the model. `store`: pixels of images by digest; `train`: the value of
        `trainer.vision.train`."""
        self._tower = tower
        self._store = store
        self._trains = train != "none"
        if tower.axes is not None:
            model = cast(GPTModel, self)
            model.rotary_pos_emb = AxisRotation(model.rotary_pos_emb.inv_freq, tower.axes)
            model.position_embedding_type = "mrope"
            model.mrope_section = None
        if not self.pre_process:
            return
        setattr(self, TOWER, build_tower(tower))
        for level in range(tower.levels):
            self.decoder.layers[level].register_forward_hook(_AddFeatures(level), with_kwargs=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        images: Sequence[Sequence[Image]] = (),
        **options: object,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Computes what the model without images computes. `input_ids` [1, T]: with context parallelism, the tokens of
        this rank. `images`: images of each packed sequence."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self._tower.axes is not None:
            positions = packed_positions(lengths, images, self._tower.merge)
            position_ids = torch.from_numpy(positions).to(input_ids.device)
        if self.pre_process and any(images):
            decoder_input = self._embedded(input_ids, lengths, images, packed_seq_params)
        return super().forward(  # type: ignore[misc]  # of GPTModel
            input_ids, position_ids, attention_mask, decoder_input, packed_seq_params=packed_seq_params, **options
        )

    def _embedded(
        self,
        input_ids: torch.Tensor,
        lengths: Sequence[int],
        images: Sequence[Sequence[Image]],
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        """Returns the decoder's input [T, 1, h], or [T / TP, 1, h] with sequence parallelism, and stores the features
        for the first decoder layers in `packed`."""
        words = self.embedding(input_ids=input_ids, position_ids=None)
        shown = {image.digest: image for images_of_one in images for image in images_of_one}
        seen = self._seen(list(shown.values()))
        ends = accumulate(image.stop - image.start for image in shown.values())
        first = dict(zip(shown, [0, *ends], strict=False))
        tokens, embeddings = self._local(lengths, *placeholders(lengths, images, first))
        device = input_ids.device
        where = torch.from_numpy(tokens).to(device)
        which = torch.from_numpy(embeddings).to(device)

        def placed(features: torch.Tensor) -> torch.Tensor:
            # Scattered instead of sliced: the backward pass then gathers, so every rank has the tower's full gradient.
            full = features.new_zeros(input_ids.shape[1], 1, features.shape[-1])
            full = full.index_copy(0, where, features[which].unsqueeze(1))
            return scatter_to_sequence_parallel_region(full) if self.config.sequence_parallel else full

        is_image = placed(torch.ones(len(seen.pooler_output), 1, device=device)) > 0
        states = torch.where(is_image, placed(seen.pooler_output).to(words.dtype), words)
        features = [placed(level) for level in seen.deepstack_features or ()] if self._tower.levels else []
        if features:
            features, states = separated(features, states)
            packed.image_features = features
        return states

    def _seen(self, images: Sequence[Image]) -> SeenImages:
        """Returns the tower's outputs for `images`, in their order."""
        module = getattr(self, TOWER)
        parameter = next(module.parameters())
        pixels = np.concatenate([self._store.load(image.digest) for image in images])
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._trains):
            return module(
                torch.from_numpy(pixels).to(parameter.device, parameter.dtype),
                grid_thw=torch.tensor([image.grid for image in images], device=parameter.device),
            )

    def _local(
        self, lengths: Sequence[int], tokens: np.ndarray, embeddings: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns those of the placeholder tokens that this context-parallel rank has, by their index among its tokens,
        and the indices of their embeddings."""
        size = parallel_state.get_context_parallel_world_size()
        if size == 1:
            return tokens, embeddings
        place = np.full(sum(lengths), -1)
        mine = zigzag(lengths, size, parallel_state.get_context_parallel_rank())
        place[mine] = np.arange(len(mine))
        local = place[tokens]
        return local[local >= 0], embeddings[local >= 0]


class AxisRotation(nn.Module):
    """Rotary embedding whose frequencies rotate by different position axes (M-RoPE)."""

    def __init__(self, inv_freq: torch.Tensor, axes: Sequence[int]):
        super().__init__()
        self.inv_freq = inv_freq
        self.axes = torch.tensor(axes, device=inv_freq.device)

    def forward(self, position_ids: torch.Tensor, mrope_section: None, cp_group: object = None) -> torch.Tensor:
        """Returns the angles [T, 1, 1, d] of the positions [3, T] of whole packed sequences; megatron-core selects
        those of a context-parallel rank."""
        angles = position_ids.float()[self.axes].T * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class _AddFeatures:
    """Forward hook that adds an image's features to the output of one decoder layer."""

    def __init__(self, level: int):
        self.level = level

    def __call__(self, _: nn.Module, __: object, kwargs: dict[str, Any], output: Any) -> Any:
        features = getattr(kwargs["packed_seq_params"], "image_features", None)
        if features is None:
            return output
        states, *rest = output if isinstance(output, tuple) else (output,)
        states = states + features[self.level].to(states.dtype)
        return (states, *rest) if isinstance(output, tuple) else states


def separated(features: Sequence[torch.Tensor], states: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns copies of `features` that are leaves of the graph, and `states` with a backward pass that continues from
    their gradients. Decoder layers whose activations are recomputed could not pass gradients to `features` otherwise,
    because each recomputation is a graph of its own."""
    leaves: list[torch.Tensor] = []
    return leaves, _Separated.apply(leaves, states, *features)


class _Separated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: list[torch.Tensor], states: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        leaves += [level.detach().requires_grad_(level.requires_grad) for level in features]
        ctx.leaves = leaves
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, gradient, *(leaf.grad for leaf in ctx.leaves)


def build_tower(tower: Tower) -> nn.Module:
    """Builds the tower as transformers' module, with uninitialized weights and rotary frequencies in fp32."""
    kind = resolve_name(tower.module)
    config = kind.config_class(**tower.fields)
    module: nn.Module = kind._from_config(config, attn_implementation="sdpa")
    for part in module.modules():
        frequencies = getattr(part, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor):
            part.register_forward_pre_hook(_Restore(frequencies.detach().clone()))
    return module


class _Restore:
    """Forward hook that restores a module's rotary frequencies in fp32, because conversions of the model to bf16 round
    its buffers."""

    def __init__(self, frequencies: torch.Tensor):
        self.frequencies = frequencies

    def __call__(self, module: Any, _: object) -> None:
        module.inv_freq = self.frequencies = self.frequencies.to(module.inv_freq.device)
