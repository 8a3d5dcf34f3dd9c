"""Presents a server's model and its draft model for speculative decoding to the receiver as one model, so that one
publication updates both.

Written for sglang 0.5.23, for draft models that consist of the multi-token prediction layer of the target (the served
model). SGLang runs such a draft as a separate model that shares the target's embedding and output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from slimx.adapters.sglang.weights.places import PostLoads
from slimx.adapters.sglang.weights.receiver import ATTRIBUTE, RankReceiver
from slimx.errors import SlimxError
from slimx.layout.engine import DRAFT

OPTION = "--publish-draft"
"""Command-line option of `slimx.engines.server.launch` that makes publications include the draft model. The server's
child processes see it too, because they have the same `sys.argv`."""
START = "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker"
_TARGET = "target."


def publishes_draft(argv: Sequence[str]) -> bool:
    """Returns True if `argv`, the command line of `slimx.engines.server.launch`, contains `OPTION` among slimx's own
    arguments (before `--`)."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    return OPTION in options


class WithDraft(nn.Module):
    """Target and draft model as one module. The target's parameters keep their names, and the draft's have the prefix
    `DRAFT`. Parameters that both models share appear under the target's name only."""

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.target = target
        setattr(self, DRAFT.removesuffix("."), draft)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix(_TARGET), parameter

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield name.removeprefix(_TARGET), module

    def post_load_weights(self) -> None:
        """Makes both the target and the draft model recompute the tensors that SGLang derives from loaded weights."""
        for model in self.children():
            if isinstance(model, PostLoads):
                model.post_load_weights()


def take_draft(result: None, scheduler: Any) -> None:
    """Gives the target model a receiver that also covers the draft model; runs after
    `Scheduler.maybe_init_draft_worker`. Raises SlimxError unless the server has exactly one draft model."""
    drafts = [] if scheduler.draft_worker is None else scheduler.draft_worker.weight_update_runners()
    if len(drafts) != 1:
        raise SlimxError(
            f"the server has {len(drafts)} draft models, but slimx can publish weights to only one; if the model has "
            "one multi-token prediction layer, set rollout.engines.sglang.speculative_algorithm=EAGLE",
            code="plugin.drafts",
            about="speculative_algorithm",
        )
    target = scheduler.tp_worker.model_runner.model
    _, runner = drafts[0]
    object.__setattr__(target, ATTRIBUTE, RankReceiver(WithDraft(target, runner.model)))
