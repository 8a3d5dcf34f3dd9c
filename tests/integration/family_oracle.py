"""A tiny model of transformers with what it computes: the other side of test_families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from slimx.data.loss_weights import loss_weights
from slimx.data.records import Trajectory
from tests.integration.conftest import Weights
from tests.integration.trainer_rank import demonstrations

Fill = Callable[[torch.nn.Module], None]
"""Gives a model its weights."""


class Oracle:
    """A model of transformers with weights far from uniform, its checkpoint, and what it says of the demonstrations."""

    def __init__(self, path: Path, model: Any):
        """`path`: of the checkpoint of `model`."""
        self.path, self.model, self.weights = path, model, read(path)

    def trajectories(self) -> list[Trajectory]:
        """The demonstrations that the trainer is given."""
        return demonstrations(0)

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """[L, vocab], with gradient."""
        return self.model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]

    @cached_property
    def answers(self) -> tuple[dict[tuple[int, ...], torch.Tensor], Weights]:
        """Logits [L - 1, vocab] of every demonstration by its tokens, and the gradients of a step on all of them by
        checkpoint name."""
        batch, logits = self.trajectories(), {}
        self.model.zero_grad()
        for trajectory, weight in zip(batch, loss_weights(batch, "token"), strict=True):
            output = logits[tuple(trajectory.token_ids.tolist())] = self.logits(trajectory.token_ids[:-1])
            labels = torch.from_numpy(trajectory.token_ids[1:].astype(np.int64))
            loss = torch.nn.functional.cross_entropy(output, labels, reduction="none")
            (torch.from_numpy(weight) * loss).sum().backward()
        return {tokens: output.detach() for tokens, output in logits.items()}, self._gradients()

    def _gradients(self) -> Weights:
        """Written as a checkpoint of its own: transformers names and splits them as it does the weights."""
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        with torch.no_grad():
            for tensor in {**dict(self.model.named_parameters()), **persistent(self.model)}.values():
                tensor.copy_(torch.tensor(torch.nan) if tensor.grad is None else tensor.grad)
        self.model.save_pretrained(self.path / "gradients")
        self.model.load_state_dict(kept)
        return {name: tensor for name, tensor in read(self.path / "gradients").items() if not tensor.isnan().any()}


def stock_model(path: Path, seed: int, config: str, fields: dict[str, Any], fill: Fill | None = None) -> Any:
    """A model of transformers, whose checkpoint is written to `path`. `config`: name of its configuration's class;
    `fill`: `scatter` by default."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**fields), dtype=torch.float32, attn_implementation="eager"
    )
    (fill or scatter)(model)
    model.save_pretrained(path)
    return model


def scatter(module: torch.nn.Module) -> None:
    """Random weights large enough that an exchanged, transposed or missing one shows."""
    with torch.no_grad():
        for tensor in {**dict(module.named_parameters()), **persistent(module)}.values():
            noise = torch.randn_like(tensor)
            tensor.add_(0.2 * noise) if tensor.dim() == 1 else tensor.copy_(0.2 * noise)


def scatter_slow_decays(module: torch.nn.Module) -> None:
    """`scatter`, and delta nets that forget over many tokens. transformers starts some that forget within one: its
    chunk rule then takes differences of sums of several hundreds, whose rounding alone is the tests' tolerance."""
    scatter(module)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if name.endswith(".A_log"):
                tensor.copy_(torch.rand_like(tensor) * 2 - 3)


def persistent(module: torch.nn.Module) -> Weights:
    """Buffers that belong to the checkpoint."""
    return {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}


def read(directory: Path) -> Weights:
    """All tensors of a checkpoint."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
