"""The policy's model on one trainer rank, and its operations, which are called on all ranks at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

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
from slimx.trainer.step.forward_backward import Pipeline, Trained
from slimx.trainer.step.metrics import combine, gap_metrics, mismatch_metrics, mismatch_sums, quotient, reduce, summed
from slimx.trainer.step.optimizer import OptimizerStep, build_optimizer, learning_rate
from slimx.trainer.step.passes import ForwardPasses, Holder
from slimx.trainer.trained_model import TrainedModel


class PolicyTrainer(TrainedModel):
    """Trainer of the policy on one rank: its model, its optimizer, its pipeline, and the forward passes of reference
    and teacher."""

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
            engine_logprobs_exact=config.engine_logprobs_exact,
        )

    @operation("train", needs="training")
    def train_updates(self, updates: list[list[MicroBatch]], *, step: int, version: int) -> dict[str, float]:
        """Performs all updates of training step `step`, counted from 0: one optimizer step for each list of this
        data-parallel rank's micro-batches. Returns the metrics of the step; ranks of earlier pipeline stages return
        only the optimizer's metrics.

        `version`: version of the engines' weights. The log-prob gap is measured in the first update, on tokens that
        this version sampled, because in later updates trainers and engines have different weights."""
        totals = [self.routing.totals(batches) for batches in updates]
        local = [self._local(batches) for batches in updates]
        # All updates together, so that weights are exchanged once and recomputed log-probs are those of the old policy.
        prior = self.passes.before_updates(list(chain(*local)))
        others = iter(prior.fields)
        routes = iter(prior.routes or ())
        packings = iter(prior.packings or ())
        metrics = []
        self._trained = []
        for index, batches in enumerate(local):
            metrics.append(
                self._update(
                    batches,
                    list(islice(others, len(batches))),
                    replay=list(islice(routes, len(batches))) or None,
                    packings=list(islice(packings, len(batches))) or None,
                    totals=totals[index],
                    step=step * len(updates) + index,
                    version=None if index else version,
                )
            )
        self._gather()
        return combine(metrics)

    @operation()
    def trained_tokens(self) -> list[list[dict[str, np.ndarray]]]:
        """Returns values of the last training step, by update and micro-batch: `logprobs` float32 [T], the log-prob of
        each label in the forward pass of its update; and `other_experts` bool [T], True where a router chose different
        experts from the engine's. Returns [] on all but the last pipeline stage; a second call for the same step
        returns [] everywhere. Collective over context-parallel ranks."""
        trained = self._trained
        self._trained = []
        out = []
        for update in trained:
            batches = []
            for logprobs, differs, lengths in update:
                logprobs = self.context.gather(logprobs, lengths)
                differs = self.context.gather(differs.to(torch.uint8), lengths)
                batches.append(
                    {"logprobs": logprobs.cpu().numpy(), "other_experts": differs.cpu().numpy().astype(bool)}
                )
            out.append(batches)
        return out

    def train_step(self, batches: list[MicroBatch], *, step: int, version: int) -> dict[str, float]:
        """Performs a training step that has a single update, like `train_updates` with one list of micro-batches."""
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
        """Runs forward and backward passes and one optimizer step, and returns their metrics.

        `batches`: micro-batches with this rank's tokens. `others`: results of earlier forward passes on these
        micro-batches. `replay`: experts that the routers must use; None if each router chooses. `packings`: see
        `Pipeline.train`. `totals`: denominators of the routers' auxiliary losses. `step`: number of optimizer steps
        before this one. `version`: version of the engines' weights if the update starts from the same weights; None
        otherwise."""
        self._zero_gradients()
        with self.routing.training(batches, totals=totals, replay=replay):
            results = self.pipeline.train(batches, self.loss, others, packings)
        self.routing.gather_sums()
        differs = self._differing(batches)
        metrics = self._metrics(batches, results, version, differs)
        if self.parallel.last_stage:
            metrics |= self.routing.metrics()
            trained = []
            for (_, logprobs), marks, batch in zip(results, _by_batch(differs, batches), batches, strict=True):
                trained.append((logprobs.detach(), marks, batch.lengths))
            self._trained.append(trained)
        rate = learning_rate(self.config.trainer.optimizer, step, self.config.schedule.updates)
        stepped = self.optimizer_step(rate)
        if not stepped["optim/skipped"]:
            self.weights.changed()
            self.routing.update_bias()
        metrics |= stepped
        return metrics

    def scores(self, batches: list[MicroBatch], *, under: Holder = "policy") -> list[dict[str, np.ndarray]]:
        """Computes `logprobs`, the log-prob of every label, and `entropy`, the entropy of the distribution that
        predicts it, with the weights of the policy, the reference or the teacher. Returns one dict of arrays [T] per
        micro-batch; [] except on the last pipeline stage."""
        values = self.passes.scores(self._local(batches), under=under)
        if not self.parallel.last_stage:
            return []
        out = []
        for scores, batch in zip(values, batches, strict=True):
            named = scores._asdict().items()
            out.append({name: self.context.gather(part, batch.lengths).cpu().numpy() for name, part in named})
        return out

    @operation("logprobs", needs="weights")
    def logprobs(self, batches: list[MicroBatch], *, under: Holder = "policy") -> list[np.ndarray]:
        """Returns the log-prob of every label, one array [T] per micro-batch; [] except on the last pipeline stage.
        `under`: whose weights to use: "policy", "reference" or "teacher"."""
        return [scores["logprobs"] for scores in self.scores(batches, under=under)]

    @operation("probe", needs="weights")
    def measure_gap(self, batches: list[MicroBatch], *, version: int, mismatch: bool = False) -> dict[str, float]:
        """Returns metrics of the log-prob gap over the tokens of `batches` that `version` sampled, with the current
        weights and without training. If `mismatch` is true, also compares the log-probs of all trained tokens, whatever
        version sampled them (`mismatch_metrics`)."""
        batches = self._local(batches)
        replay = self.routing.from_engine(batches) if self.config.trainer.moe.routing_replay == "R3" else None
        with self.routing.forward(batches, replay=replay):
            scores = self.pipeline.scores(batches)
        results: list[Trained] = [({}, score.logprobs) for score in scores]
        return self._metrics(batches, results, version, self._differing(batches), mismatch=mismatch)

    @operation(needs="weights")
    def refresh_reference(self, *, path: str | None = None) -> None:
        """Replaces the reference with the weights in the Hugging Face directory `path`; by default, with the current
        weights."""
        if path is None:
            self.passes.refresh_reference()
        else:
            self.passes.load_reference(path)

    def _before(self, differs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Extends the mask `differs`, which marks some of this rank's tokens in one micro-batch, to all later tokens of
        the same sequences."""
        full = self.context.gather(differs.to(torch.uint8), lengths)
        return self.context.local(within_sequence(full, lengths), lengths)

    def _differing(self, batches: list[MicroBatch]) -> torch.Tensor:
        """Returns a mask of this rank's tokens, bool [sum of T]: True where a layer on any pipeline stage used
        different experts from the engine's. Collective over tensor-parallel ranks and pipeline stages."""
        differs = self.routing.differing(batches)
        if self.parallel.sizes.pipeline > 1:
            marks = differs.to(torch.uint8)
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.parallel.pipeline_group)
            differs = marks.bool()
        return differs

    def _metrics(
        self,
        batches: list[MicroBatch],
        results: list[Trained],
        version: int | None,
        differs: torch.Tensor,
        *,
        mismatch: bool = True,
    ) -> dict[str, float]:
        """Computes the metrics of a pass from `results`, one result per micro-batch, and reduces them over ranks.
        `version`: version of the weights that sampled the tokens on which the log-prob gap is measured; None to measure
        no gap. `differs`: result of `_differing`. `mismatch`: False if the tokens are not those of a training step;
        then only the gap is measured."""
        if not self.parallel.last_stage:
            return {}
        values = summed([metrics for metrics, _ in results])
        if not self.config.rollout.sampled:
            return reduce(values, self.parallel.token_group)
        weight = self._concatenated([batch.weight for batch in batches])
        versions = self._concatenated([batch.versions for batch in batches])
        rollout = self._concatenated([batch.rollout_logprobs for batch in batches])
        logprobs = torch.cat([logprobs for _, logprobs in results])
        if mismatch:
            values |= mismatch_sums(logprobs, rollout, weight > 0)
        if version is None:
            return mismatch_metrics(reduce(values, self.parallel.token_group))
        before = []
        for part, batch in zip(_by_batch(differs, batches), batches, strict=True):
            before.append(self._before(part, batch.lengths))
        measured = (weight > 0) & (versions == version)
        comparable = torch.cat([self.routing.comparable(batch) for batch in batches])
        values |= gap_metrics(logprobs, rollout, measured, differs, torch.cat(before), comparable)
        metrics = mismatch_metrics(reduce(values, self.parallel.token_group))
        metrics["gap/mean"] = quotient(metrics.pop("gap/sum"), metrics["gap/tokens"])
        return metrics

    def _concatenated(self, arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.parallel.device)


def _by_batch(values: torch.Tensor, batches: list[MicroBatch]) -> Sequence[torch.Tensor]:
    """Splits `values` [sum of T] into one tensor [T] per micro-batch."""
    return values.split([len(batch.tokens) for batch in batches])


def _load(weights: Weights, path: Path, chunks: list[DistributedDataParallel]) -> None:
    """Loads the model's weights from a Hugging Face directory, or from a checkpoint of another format."""
    checkpoint_format = format_of(path)
    if checkpoint_format is not None:
        checkpoint_format.load(path, weights.spec, chunks)
        weights.check_finite(path)
        weights.changed()
    else:
        weights.load(str(path))
