"""One trainer rank: its model, and what it can be asked to do. Every method is called on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slimx.algorithms.losses.objective import make_loss
from slimx.algorithms.router_terms import Totals
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.layout.megatron import MegatronLayout
from slimx.models.families import ModelSpec
from slimx.models.files.formats import format_of
from slimx.models.layer_kind import Packing
from slimx.numerics.mode import mode_of
from slimx.numerics.rounding import rounding_of
from slimx.trainer.device.backends import choose_backends, installed
from slimx.trainer.model.build import build_model, unwrap
from slimx.trainer.model.weights import Weights
from slimx.trainer.moe.routes import within_sequence
from slimx.trainer.moe.routing import Routes, Routing
from slimx.trainer.operation import operation
from slimx.trainer.parallel import ParallelState
from slimx.trainer.step.forward_backward import Pipeline
from slimx.trainer.step.metrics import combine, gap_metrics, mismatch_metrics, mismatch_sums, reduce
from slimx.trainer.step.optimizer import OptimizerStep, build_optimizer, learning_rate
from slimx.trainer.step.passes import ForwardPasses, Holder
from slimx.trainer.trained import TrainedModel


class PolicyTrainer(TrainedModel):
    """Megatron model, optimizer and pipeline of one rank."""

    def __init__(self, config: Config, spec: ModelSpec, parallel: ParallelState):
        mode = mode_of(config)
        self.backends = choose_backends(
            config.trainer,
            device=parallel.device.type,
            packages=installed(),
            replaced=mode.replaces_layers,
            layer_kind=spec.layer_kind,
            experts=spec.experts,
        )
        chunks, attached = build_model(spec, config, self.backends, device=parallel.device)
        modules = [unwrap(chunk) for chunk in chunks]
        layout = MegatronLayout(spec.table, parallel.sizes)
        weights = Weights(modules, spec, layout, parallel.rank, attached=attached)
        mode.prepare_weights(weights, config)
        _load(weights, Path(config.initial_weights), chunks)
        options = config.trainer.optimizer
        undecayed = weights.matching(options.no_weight_decay, "trainer.optimizer.no_weight_decay")
        super().__init__(config, parallel, chunks, weights, build_optimizer(config, chunks, undecayed), "trainer")
        rounding_of(config.trainer).prepare_weights(weights)
        self.optimizer_step = OptimizerStep(self.optimizer, options, weights.trainable(), parallel.host_group)
        self.loss = make_loss(config.algorithm)
        self._trained: list[list[tuple[torch.Tensor, torch.Tensor, list[int]]]] = []
        self.routing = Routing(modules, parallel, config.trainer.moe)
        self.pipeline = Pipeline(self.chunks, parallel.device, self.routing, self.context.sequence_sum)
        self.passes = ForwardPasses(
            self.pipeline,
            self.routing,
            self.weights,
            config.algorithm,
            config.trainer.moe.routing_replay,
            recorder=spec.layer_kind.recorder(config.trainer),
            known=config.samples_known,
        )

    @operation("train", needs="training")
    def train_updates(self, updates: list[list[MicroBatch]], *, step: int, version: int) -> dict[str, float]:
        """Run all updates of step `step` (from 0), one optimizer step for each list of micro-batches of this
        data-parallel rank; returns the metrics of them all, on the ranks of the last pipeline stage (elsewhere only the
        optimizer's).

        `version` is the weight version that the engines hold now. The log-prob gap is measured on its tokens in the
        first update: at the others these weights are no longer the engines'."""
        totals = [self.routing.totals(batches) for batches in updates]
        local, done = [self._local(batches) for batches in updates], step * len(updates)
        # All of them before the first update: other weights come once, and recomputed log-probs are of the old policy.
        known = self.passes.before_updates([batch for batches in local for batch in batches])
        others, routes, packings = iter(known.fields), iter(known.routes or ()), iter(known.packings or ())
        metrics, self._trained = [], []
        for number, batches in enumerate(local):
            metrics.append(
                self._update(
                    batches,
                    list(islice(others, len(batches))),
                    replay=list(islice(routes, len(batches))) or None,
                    packings=list(islice(packings, len(batches))) or None,
                    totals=totals[number],
                    step=done + number,
                    version=None if number else version,
                )
            )
        self._gather()
        return combine(metrics)

    @operation()
    def trained_tokens(self) -> list[list[dict[str, np.ndarray]]]:
        """By update and micro-batch of the last step `logprobs` float32 [T], each label's under the weights that it was
        trained with, and `other_experts` bool [T], true where a router chose otherwise than the engine's (last stage
        only). They are told once. Collective over context-parallel ranks."""
        trained, self._trained = self._trained, []
        return [
            [
                {
                    "logprobs": self.context.whole(logprobs, lengths).cpu().numpy(),
                    "other_experts": self.context.whole(differs.to(torch.uint8), lengths).cpu().numpy().astype(bool),
                }
                for logprobs, differs, lengths in update
            ]
            for update in trained
        ]

    def train_step(self, batches: list[MicroBatch], *, step: int, version: int) -> dict[str, float]:
        """A step of one update."""
        return self.train_updates([batches], step=step, version=version)

    def _update(
        self,
        batches: list[MicroBatch],
        others: list[dict[str, torch.Tensor]],
        *,
        replay: Routes | None,
        packings: list[Packing] | None,
        totals: Totals | None,
        step: int,
        version: int | None,
    ) -> dict[str, float]:
        """Run forward, backward and one optimizer step.

        `batches`: this rank's tokens; `others`: what other forward passes brought. `replay`: experts to take, None for
        each router's own choice; `packings`: choices of other layers, likewise. `totals`: denominators of the routers'
        terms. `step`: optimizer steps done so far, which the learning rate follows. `version` None: these weights are
        no engine's."""
        self._zero_gradients()
        with self.routing.training(batches, totals=totals, replay=replay):
            results = self.pipeline.train(batches, self.loss, others, packings)
        self.routing.gather_sums()
        differs = self._differing(batches)
        metrics = self._metrics(batches, results, version, differs)
        if self.parallel.last_stage:
            metrics |= self.routing.metrics()
            self._trained.append(
                [
                    (logprobs.detach(), marks, batch.lengths)
                    for (_, logprobs), marks, batch in zip(results, _by_batch(differs, batches), batches, strict=True)
                ]
            )
        rate = learning_rate(self.config.trainer.optimizer, step, self.config.schedule.updates)
        stepped = self.optimizer_step(rate)
        if not stepped["optim/skipped"]:
            self.weights.changed()
            self.routing.update_bias()
        metrics |= stepped
        return metrics

    def scores(self, batches: list[MicroBatch], *, under: Holder = "policy") -> list[dict[str, np.ndarray]]:
        """Score every label under the present weights, or those of the reference or the teacher: `logprobs` and
        `entropy`, one dictionary of arrays [T] per micro-batch (last stage only)."""
        values = self.passes.scores(self._local(batches), under=under)
        if not self.parallel.last_stage:
            return []
        return [
            {name: self.context.whole(part, b.lengths).cpu().numpy() for name, part in scores._asdict().items()}
            for scores, b in zip(values, batches, strict=True)
        ]

    @operation("logprobs", needs="weights")
    def logprobs(self, batches: list[MicroBatch], *, under: Holder = "policy") -> list[np.ndarray]:
        """Log-prob of every label, one array [T] per micro-batch (last stage only), as `scores`."""
        return [scores["logprobs"] for scores in self.scores(batches, under=under)]

    @operation("probe", needs="weights")
    def measure_gap(self, batches: list[MicroBatch], *, version: int, mismatch: bool = False) -> dict[str, float]:
        """The gap metrics of `batches` under the present weights, without training on them; with `mismatch` also those
        of all their trained tokens, whatever their version."""
        batches = self._local(batches)
        replay = self.routing.from_engine(batches) if self.config.trainer.moe.routing_replay == "R3" else None
        with self.routing.forward(batches, replay=replay):
            scores = self.pipeline.scores(batches)
        found = [({}, each.logprobs) for each in scores]
        return self._metrics(batches, found, version, self._differing(batches), mismatch=mismatch)

    @operation(needs="weights")
    def refresh_reference(self, *, path: str | None = None) -> None:
        """Make the weights in the Hugging Face directory `path`, or the present ones, the reference."""
        if path is None:
            self.passes.refresh_reference()
        else:
            self.passes.load_reference(path)

    def _before(self, differs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Mark this rank's tokens that differ, or follow one of their sequence that does."""
        whole = self.context.whole(differs.to(torch.uint8), lengths)
        return self.context.part(within_sequence(whole, lengths), lengths)

    def _differing(self, batches: list[MicroBatch]) -> torch.Tensor:
        """Mark this rank's tokens, bool [sum of T], for which a layer of any pipeline stage took other experts than the
        engine. Collective over tensor-parallel ranks and stages."""
        differs = self.routing.differing(batches)
        if self.parallel.sizes.pipeline > 1:
            seen = differs.to(torch.uint8)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.parallel.pipeline_group)
            differs = seen.bool()
        return differs

    def _metrics(
        self,
        batches: list[MicroBatch],
        results: list,
        version: int | None,
        differs: torch.Tensor,
        *,
        mismatch: bool = True,
    ) -> dict[str, float]:
        """Sums over micro-batches and ranks. `differs`: see `_differing`. `mismatch`: not where the gap alone is
        measured, on other tokens than a step's."""
        device = self.parallel.device
        if not self.parallel.last_stage:
            return {}
        values = {name: ("sum", sum(metrics[name] for metrics, _ in results)) for name in results[0][0]}
        if not self.config.rollout.sampled:
            return reduce(values, self.parallel.token_group)
        weight, versions, rollout = (
            torch.from_numpy(np.concatenate([getattr(batch, name) for batch in batches])).to(device)
            for name in ("weight", "versions", "rollout_logprobs")
        )
        logprobs = torch.cat([logprobs for _, logprobs in results])
        if mismatch:
            values |= mismatch_sums(logprobs, rollout, weight > 0)
        if version is None:
            return mismatch_metrics(reduce(values, self.parallel.token_group))
        before = torch.cat(
            [
                self._before(part, batch.lengths)
                for part, batch in zip(_by_batch(differs, batches), batches, strict=True)
            ]
        )
        measured = (weight > 0) & (versions == version)
        comparable = torch.cat([self.routing.comparable(batch) for batch in batches])
        values |= gap_metrics(logprobs, rollout, measured, differs, before, comparable)
        metrics = mismatch_metrics(reduce(values, self.parallel.token_group))
        tokens = metrics["gap/tokens"]
        metrics["gap/mean"] = metrics.pop("gap/sum") / tokens if tokens else float("nan")
        return metrics


def _by_batch(values: torch.Tensor, batches: list[MicroBatch]) -> Sequence[torch.Tensor]:
    """Each micro-batch's part of `values` [sum of T]."""
    return values.split([len(batch.tokens) for batch in batches])


def _load(weights: Weights, path: Path, chunks: list[Any]) -> None:
    """Fill the model from a Hugging Face directory, or from a checkpoint of another form."""
    if (found := format_of(path)) is not None:
        found.load(path, weights.spec, chunks)
        weights.check_finite(path)
        weights.changed()
    else:
        weights.load(str(path))
