"""One optimizer step that no rank takes alone: norm, clipping, and a skip where a gradient is not finite or all are 0.

gradients of all ranks -> norm -> finite on every rank?  -- yes -->  clip -> Adam -> weights
                                                         -- no --->  nothing changes; counted, stopped after n
                                  0 on every rank?       -- yes -->  nothing changes; counted

Of a gradient that is 0 everywhere, as where all rollouts of each group earned the same, nothing can be learned; yet
Adam's moments of earlier steps would go on moving the weights, and decay would shrink them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from slimx.config.sections.trainer import Optimizer
from slimx.errors import SlimxError


class OptimizerStep:
    """Steps one optimizer. Collective: all ranks of `group` call it together and decide alike."""

    def __init__(
        self,
        optimizer: Any,
        options: Optimizer,
        named: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        key: str = "trainer.optimizer",
        metrics: str = "optim",
    ):
        """`optimizer`: Megatron's, see `build_optimizer`. `named`: this rank's trainable parameters in the order of the
        forward pass, by the names that an error shall show. `group`: every rank of the model, on the host. `key`: where
        the configuration has `options`. `metrics`: what the metrics' names begin with."""
        self.optimizer, self.options, self.named, self.group = optimizer, options, dict(named), group
        self.key, self.prefix = key, metrics
        self.skipped_in_a_row = 0

    def __call__(self, rate: float) -> dict[str, float]:
        """Apply the present gradients with learning rate `rate`; returns metrics.

        After a skip weights, moments and Adam's own step count are what they were, bit for bit, and so they are where
        the gradient is exactly 0 everywhere, with those of all terms of the loss. Raises SlimxError on
        every rank after `max_skipped` skips in a row for what is not finite, naming the parameter where it began.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            # megatron marks what is not decayed with wd_mult 0 and leaves it to its scheduler, not used here, to apply.
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm() or 0.0)
        # The squares of tiny gradients are 0 in fp32: the norm alone does not say that there is nothing.
        finite, empty = self._everywhere(math.isfinite(norm), norm == 0 and not any(map(_any, self.named.values())))
        if not finite:
            self._skip(norm)
        else:
            self.skipped_in_a_row = 0
            if not empty:
                self._clip(norm)
                self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()  # fp32 copies of this rank's share where gradients are bf16; the buffers stay
        values = {"lr": rate, "grad_norm": norm, "skipped": float(not finite), "zero_gradient": float(empty)}
        return {f"{self.prefix}/{name}": value for name, value in values.items()}

    def _everywhere(self, *conditions: bool) -> list[bool]:
        # Norms of one model are equal on all ranks by construction; a rank that stepped alone would be beyond repair.
        answers = torch.tensor(conditions, dtype=torch.int32)
        dist.all_reduce(answers, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(answer) for answer in answers.tolist()]

    def _clip(self, norm: float) -> None:
        if not self.options.clip_grad:
            return
        for part in self.optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self.options.clip_grad, norm)

    def _skip(self, norm: float) -> None:
        self.skipped_in_a_row += 1
        where = first_nonfinite(self.named, self.group)
        print(f"slimx: optimizer step skipped, the gradient norm is {norm}: {where}", flush=True)
        if self.skipped_in_a_row >= self.options.max_skipped > 0:
            raise SlimxError(
                f"{self.skipped_in_a_row} optimizer steps in a row had gradients that are not finite "
                f"({self.key}.max_skipped), now {where}; look at loss, rewards and learning rate of the last "
                "steps, and continue from the newest checkpoint",
                code="trainer.max_skipped",
                about=f"{self.key}.max_skipped",
            )


def first_nonfinite(named: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup) -> str:
    """Name the place where gradients are not finite; collective, equal on all ranks.

    Of each rank the last parameter of the forward pass: the backward pass came there first, and everything before it
    is infected. Ranks of later pipeline stages have the higher numbers.
    """
    bad = [name for name, parameter in named.items() if not _finite(parameter)]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (bad[-1] if bad else None, len(bad), len(named)), group=group)
    total = sum(count for _, count, _ in said)
    found = [(rank, name, count, of) for rank, (name, count, of) in enumerate(said) if name is not None]
    if not found:
        return "every gradient is finite, but the sum of their squares is not"
    rank, name, count, of = found[-1]
    ranks = f", {total} on {len(found)} ranks" if len(found) > 1 else ""
    return f"first in {name} on trainer rank {rank} ({count} of its {of} parameters{ranks})"


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", parameter.grad)


def _finite(parameter: torch.nn.Parameter) -> bool:
    gradient = _gradient(parameter)
    return gradient is None or bool(torch.isfinite(gradient).all())


def _any(parameter: torch.nn.Parameter) -> bool:
    """Returns True if the parameter has a gradient that is not 0."""
    gradient = _gradient(parameter)
    return gradient is not None and bool(gradient.any())
