"""Forward passes over the same micro-batches with different weights: the policy's, the reference's and the
teacher's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import MicroBatch
from slimx.errors import SlimxError
from slimx.models.layer_kind import Packing
from slimx.trainer.model.weights import HostCopy, Weights
from slimx.trainer.moe.routing import Routes, Routing
from slimx.trainer.step.forward_backward import Pipeline, TokenScores

Holder = Literal["policy", "reference", "teacher"]
Replay = Literal["none", "R2", "R3"]


class PriorResults(NamedTuple):
    """Results of the forward passes over all micro-batches of a step before its first update."""

    fields: list[dict[str, torch.Tensor]]
    """For each micro-batch, fields of `LossInputs` by name; {} except on the last pipeline stage."""
    routes: Routes | None
    """For each micro-batch, the experts that training must use; None if each router chooses."""
    packings: list[Packing] | None
    """For each micro-batch, a function that creates its PackedSeqParams with the discrete choices that layers made in
    these passes, such as the tokens that sparse attention selected. Training reuses these choices. None if layers
    choose again in training."""


class ForwardPasses:
    """Computes log-probs with different weights by copying them, for the duration of a pass, into the memory of the
    policy's parameters."""

    def __init__(
        self,
        pipeline: Pipeline,
        routing: Routing,
        weights: Weights,
        algorithm: Algorithm,
        replay: Replay,
        *,
        recorder: Callable[[], Packing] | None = None,
        engine_logprobs_exact: bool = False,
    ):
        """Copies the weights of the reference and of the teacher to the host, each only if `algorithm` needs it.
        `weights`: must contain the initial weights, which become the reference. `replay`: value of
        `trainer.moe.routing_replay`. `recorder`: function that is called once per micro-batch and creates a `Packing`,
        through which layers record discrete choices for later passes; None if layers choose again in every pass.
        `engine_logprobs_exact`: True if the engines' log-probs equal the policy's before each step, bit for bit, so
        that they need not be recomputed."""
        self._pipeline = pipeline
        self._routing = routing
        self._weights = weights
        self._replay = replay
        self._recorder = recorder
        self._recompute = algorithm.old_logprobs == "recompute" and not engine_logprobs_exact
        self._copies: dict[str, HostCopy] = {}
        self._base = algorithm.reference and weights.attached.keeps_base
        """True if the reference consists of the base weights without the attached adapters, because no update changes
        the base weights."""
        if algorithm.reference and not self._base:
            self._copies["reference"] = weights.snapshot()
        if algorithm.teacher:
            self._copies["teacher"] = weights.copy_of(algorithm.teacher)

    def refresh_reference(self) -> None:
        """Replaces the reference with a copy of the current weights."""
        self._weights.snapshot(into=self._copies["reference"])

    def load_reference(self, path: str) -> None:
        """Replaces the reference with the weights in the Hugging Face directory `path`."""
        self._weights.copy_of(path, into=self._copies["reference"])

    def scores(self, batches: list[MicroBatch], *, under: Holder = "policy") -> list[TokenScores]:
        """Returns for each micro-batch the log-probs of all labels and the entropies of the distributions that predict
        them; [] except on the last pipeline stage. `under`: whose weights to use: "policy", "reference" or "teacher".
        Collective. Raises SlimxError if the run does not have the reference or teacher that `under` names."""
        if under == "policy":
            return self._pipeline.scores(batches)
        if under == "reference" and self._base:
            with self._weights.attached.left_out():
                return self._pipeline.scores(batches)
        if under not in self._copies:
            raise SlimxError(
                f"this run has no {under} to compute log-probs with; set algorithm.{under}",
                code="trainer.no_weights",
                about=f"algorithm.{under}",
            )
        with self._weights.switching() as switch:
            switch(self._copies[under])
            return self._pipeline.scores(batches)

    def before_updates(self, batches: list[MicroBatch]) -> PriorResults:
        """Runs all forward passes that the loss of a step needs before the first update, and collects the choices of
        routers and other layers that training must replay. Collective."""
        fields: dict[str, list[TokenScores]] = {}
        routes = self._routing.from_engine(batches) if self._replay == "R3" else None
        packings = [self._recorder() for _ in batches] if self._recorder else None
        if self._recompute or self._replay == "R2" or packings:
            with self._routing.forward(batches, replay=routes):
                old = self._pipeline.scores(batches, packings)
            if self._recompute:
                fields["old_logprobs"] = old
            if self._replay == "R2":
                routes = self._routing.chosen()
        if self._base:
            fields["reference_logprobs"] = self.scores(batches, under="reference")
        with self._weights.switching() as switch:
            for name, copy in self._copies.items():
                switch(copy)
                fields[f"{name}_logprobs"] = self._pipeline.scores(batches)
        if not fields:
            return PriorResults([{} for _ in batches], routes, packings)
        logprobs = []
        for batch_scores in zip(*fields.values(), strict=True):
            named = zip(fields, batch_scores, strict=True)
            logprobs.append({name: scores.logprobs for name, scores in named})
        return PriorResults(logprobs, routes, packings)
