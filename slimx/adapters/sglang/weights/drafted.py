"""A server's model and the draft of its speculative decoding as one model, to which both are published at once.

Written for sglang 0.5.23, for drafts that are the target's own layer of multi-token prediction. SGLang runs a draft as
a model beside the target, with the target's embedding and output layer in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from slimx.adapters.sglang.weights.receiver import ATTRIBUTE, RankReceiver
from slimx.errors import SlimxError
from slimx.layout.engine import DRAFT

OPTION = "--publish-draft"
"""Option of `slimx.engines.server.launch`; children of a server have the same `sys.argv`."""
START = "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker"
_TARGET = "target."


def asked(argv: Sequence[str]) -> bool:
    """True if the command line of `slimx.engines.server.launch` has drafts published, too."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return OPTION in own


class WithDraft(nn.Module):
    """Target and draft: the target's names as they are, the draft's behind `DRAFT`. What both hold is the target's."""

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.target = target
        setattr(self, DRAFT.removesuffix("."), draft)

    def named_parameters(self, *args: Any, **how: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, held in super().named_parameters(*args, **how):
            yield name.removeprefix(_TARGET), held

    def named_modules(self, *args: Any, **how: Any) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().named_modules(*args, **how):
            yield name.removeprefix(_TARGET), module

    def post_load_weights(self) -> None:
        """Have both models derive what SGLang computes from loaded weights."""
        for model in self.children():
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()


def take_draft(result: None, scheduler: Any) -> None:
    """After `Scheduler.maybe_init_draft_worker`: have the target's receiver take the draft's weights, too."""
    drafts = [] if scheduler.draft_worker is None else scheduler.draft_worker.weight_update_runners()
    if len(drafts) != 1:
        raise SlimxError(
            f"the server has {len(drafts)} draft models, and a publication brings the weights of one; set "
            "rollout.engines.sglang.speculative_algorithm=EAGLE for a model of one layer of multi-token prediction",
            code="plugin.drafts",
            about="speculative_algorithm",
        )
    target, (_, runner) = scheduler.tp_worker.model_runner.model, drafts[0]
    object.__setattr__(target, ATTRIBUTE, RankReceiver(WithDraft(target, runner.model)))
