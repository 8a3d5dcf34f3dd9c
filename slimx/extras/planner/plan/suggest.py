"""Search for layouts that fit. Every split of the trainer's ranks that the model allows is tried with the cheapest
activation strategy that fits (keep all, recompute parts, offload parts, recompute layers), and ranked by cost.

`--suggest` keeps `trainer.world_size` and everything that affects learning (batch, precision, sequence lengths). If no
split of these ranks fits, it doubles their number, up to 64 times the configured one.

    splits --> the model divides, weights and gradients alone fit --> most promising first --> memory, stage by stage
               (arithmetic: thousands in a tenth of a second)          (a few milliseconds each, TRIALS at most)"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log2
from typing import NamedTuple

from pydantic import ValidationError

from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.extras.planner.memory.engine import engine_memory, with_occupied
from slimx.extras.planner.memory.node import host_memory
from slimx.extras.planner.memory.parameter_runs import Holdings
from slimx.extras.planner.memory.phases import by_gpu, peak_of, phase_memory
from slimx.extras.planner.memory.publication import most_merging
from slimx.extras.planner.memory.trainer import StageState, holdings, stage_states, trainer_memory
from slimx.extras.planner.memory_record import EngineMemory, TrainerMemory
from slimx.extras.planner.plan.activation_strategies import STRATEGIES, ActivationStrategy, allowed
from slimx.extras.planner.plan.cost_model import Cost, recomputed_fraction, update_cost
from slimx.extras.planner.plan.splits import Fields, divides, sizes_of_split, splits
from slimx.extras.planner.record import Searched, Suggestion
from slimx.extras.planner.rules import memory
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_trunk
from slimx.preflight.hardware import OVERHEAD, Machine
from slimx.rules.flow import feeds_trainers, fits_microbatch, has_positions
from slimx.rules.layout import has_trainer_kernels, sizes_divide

TRAINED = (sizes_divide, has_trainer_kernels, has_positions, fits_microbatch, feeds_trainers)
"""Rules about the trainer's layout that a suggested layout must satisfy."""
MEMORY_RULES = rules_in(memory)
SUGGESTIONS = 5
"""Maximum number of layouts that are suggested."""
LARGEST = 64
"""Largest factor by which trainer.world_size is multiplied if no layout with fewer ranks fits."""
TRIALS = 300
"""Maximum number of layouts whose memory is computed in one search. This is not a time limit, so that the result does
not depend on the machine's load."""


class Split(NamedTuple):
    """Split of the trainer's ranks that may fit in memory."""

    fields: Fields
    """Values of the fields in section `trainer` that define this split."""
    sizes: Sizes
    elements: int
    """Number of trained parameter elements on the fullest rank."""


class Candidate(NamedTuple):
    """Split with one activation strategy, and its memory and cost."""

    config: Config
    records: tuple[TrainerMemory, ...]
    critics: tuple[TrainerMemory, ...]
    """Memory of the critic's ranks, one record per pipeline stage."""
    cost: Cost


def suggest_layouts(
    config: Config, spec: ModelSpec, machine: Machine, device: str
) -> tuple[tuple[Suggestion, ...], Searched]:
    """Returns the layouts with the least predicted time among those that fit, best first, and the extent of the search.
    Includes only the best layout for each pair of tensor-parallel and pipeline-parallel size. Raises SlimxError if the
    type of GPU is unknown."""
    search = Search(config, spec, machine, device)
    best: dict[tuple[int, int], Suggestion] = {}
    for least, sizes, suggestion in search.fitting(search.least_cost):
        costs = sorted(found.cost for found in best.values())
        if len(costs) >= SUGGESTIONS and least > costs[SUGGESTIONS - 1]:
            break  # this one and all later ones cost more
        if suggestion is not None:
            key = sizes.tensor, sizes.pipeline
            if key not in best or suggestion.cost < best[key].cost:
                best[key] = suggestion
    cheapest = sorted(best.values(), key=lambda suggestion: suggestion.cost)
    return tuple(cheapest[:SUGGESTIONS]), search.searched


def nearest_layout(
    config: Config, spec: ModelSpec, machine: Machine, device: str
) -> tuple[Suggestion | None, Searched]:
    """Returns the layout closest to the configured one among those that fit (or None), and the extent of the search."""
    search = Search(config, spec, machine, device)
    nearest: tuple[float, Suggestion] | None = None
    for distance, _, suggestion in search.fitting(lambda split: _distance(config.trainer, split.fields)):
        if nearest is not None and distance > nearest[0]:
            break
        if suggestion is not None and (nearest is None or suggestion.cost < nearest[1].cost):
            nearest = distance, suggestion
    return (nearest[1] if nearest else None), search.searched


def require_gpu(machine: Machine) -> int:
    """Returns the memory of the GPU in bytes. Raises SlimxError if the type of GPU is unknown."""
    if machine.gpu is None or machine.memory is None:
        raise SlimxError("cluster.gpu is null, but the layout search needs a GPU type; set cluster.gpu")
    return machine.memory


class Search:
    """Search among the splits of the trainer's ranks. The model's parameters are counted once for all splits."""

    def __init__(self, config: Config, spec: ModelSpec, machine: Machine, device: str):
        self.config = config
        self.spec = spec
        self.machine = machine
        self.device = device
        self.gpu_memory = require_gpu(machine)
        groups = config.served.sampling if config.schedule.colocate else ()
        self.engines: tuple[tuple[Engines, EngineMemory], ...] = tuple(
            (group, engine_memory(config, spec, group, machine, staged=0)) for group in groups
        )
        """Engine groups whose engines share the trainer's GPUs, with their memory."""
        self.holdings = holdings(config.trainer, config.numerics, spec)
        self.critic: tuple[ModelSpec, Holdings] | None = None
        """Model and parameters of a critic on the trainer's ranks; None if there is none or it has separate ranks."""
        if config.critic is not None and config.critic.placement == "shared":
            trunk = read_trunk(config.model)
            self.critic = trunk, holdings(config.as_critic().trainer, config.numerics, trunk)
        self.updates = config.rollout.prompts_per_step * config.rollout.group_size // config.schedule.updates_per_step
        self._elements: dict[Sizes, int] = {}
        self._tried = 0
        self._worlds = [config.trainer.world_size * 2**k for k in range(LARGEST.bit_length())]
        self._splits = {world: list(splits(config, spec, machine, world)) for world in self._worlds}

    @property
    def searched(self) -> Searched:
        """Extent of the search so far: the number of layouts considered, and whether the search is complete."""
        layouts = sum(map(len, self._splits.values()))
        return Searched(layouts=layouts, tried=self._tried, complete=self._tried < TRIALS)

    def fitting(self, promise: Callable[[Split], float]) -> Iterator[tuple[float, Sizes, Suggestion | None]]:
        """Tries splits in ascending order of `promise(split)`. For each split, yields this value, the split's sizes and
        a suggestion, or None if the split does not fit. Stops after the smallest world size at which a split fits, or
        after `TRIALS` splits."""
        for world in self._worlds:
            any_fits = False
            ordered = [(promise(split), split) for split in self._possible(world)]
            ordered.sort(key=lambda pair: pair[0])
            for value, split in ordered:
                if self._tried == TRIALS:
                    return
                self._tried += 1
                suggestion = self.fit(split)
                any_fits = any_fits or suggestion is not None
                yield value, split.sizes, suggestion
            if any_fits:
                return

    def least_cost(self, split: Split) -> float:
        """Returns a lower bound on the seconds of an update with this split: the time without recomputation."""
        return round(self._cost(split.sizes, split.elements * self._element_bytes).total, 4)

    def _cost(
        self, sizes: Sizes, exchanged: int, *, hosted: int = 0, offloaded: int = 0, trainer: Trainer | None = None
    ) -> Cost:
        return update_cost(
            self.config,
            self.spec,
            sizes,
            self.machine,
            exchanged=exchanged,
            hosted=hosted,
            offloaded=offloaded,
            trainer=trainer,
        )

    @property
    def _element_bytes(self) -> int:
        """Number of bytes that the weight and the fp32 gradient of a trained parameter element take."""
        return ITEMSIZE[self.config.numerics.dtype] + 4

    def _possible(self, world: int) -> Iterator[Split]:
        """Yields the splits of `world` ranks that divide the model and whose weights and gradients fit in memory."""
        for fields in self._splits[world]:
            sizes = sizes_of_split(fields)
            if divides(sizes, self.spec, self.updates):
                split = Split(fields, sizes, self._fullest(sizes))
                if self._floor(split) <= self.gpu_memory:
                    yield split

    def _fullest(self, sizes: Sizes) -> int:
        """Returns the number of trained parameter elements on the fullest rank for the parallel sizes `sizes`."""
        alone = replace(sizes, context=1, data=sizes.expert * sizes.expert_tensor)
        if alone not in self._elements:
            stages = self.holdings.unlike_stages(alone)
            self._elements[alone] = max(self.holdings.elements(alone, stage * alone.stage) for stage in stages)
        return self._elements[alone]

    def _floor(self, split: Split) -> int:
        """Returns the minimum GPU memory, in bytes, for training with this split under any activation strategy."""
        overhead = OVERHEAD if self.device == "cuda" else 0
        static = split.elements * self._element_bytes
        training = static + overhead
        floor = training + self.config.trainer.memory_margin_mib * 2**20
        if self.engines:
            publishing = max(engine.weights for _, engine in self.engines)
            publishing += split.elements * ITEMSIZE[self.config.numerics.dtype]
            floor = max(floor, training + OVERHEAD, publishing + OVERHEAD + overhead)
        return floor

    def fit(self, split: Split) -> Suggestion | None:
        """Returns the suggestion for this split with the cheapest activation strategy that fits; None if none fits."""
        states = self._states(split)
        if states is None:
            return None
        first, *between, _ = STRATEGIES
        plain = self._configured(split, first)
        if plain is not None:
            cheapest = self._weigh(split, plain, states)
            if not self._problems(cheapest):
                return self._suggested(cheapest)
        smallest_config = self._smallest(split)
        if smallest_config is None:
            return None
        smallest = self._weigh(split, smallest_config, states)
        problems = self._problems(smallest)
        if any(problem.code != "memory.host" for problem in problems):
            return None  # all other strategies need more GPU memory
        best = None if problems else smallest
        # A lower bound of the cost is known before the memory is computed.
        for promise, config in sorted(self._promised(split, between, smallest), key=lambda pair: pair[0]):
            if best is not None and promise >= best.cost.total:
                break
            candidate = self._weigh(split, config, states)
            if (best is None or candidate.cost.total < best.cost.total) and not self._problems(candidate):
                best = candidate
        return None if best is None else self._suggested(best)

    def _smallest(self, split: Split) -> Config | None:
        """Returns the configuration whose strategy uses the least GPU memory; None if no strategy is allowed."""
        for strategy in reversed(STRATEGIES):
            config = self._configured(split, strategy)
            if config is not None:
                return config
        return None

    def _promised(
        self, split: Split, strategies: Sequence[ActivationStrategy], like: Candidate
    ) -> Iterator[tuple[float, Config]]:
        """Yields, for each strategy, a lower bound on the duration of an update in seconds (without waits for copies to
        the host), and the configuration with this strategy. `like`: candidate with the same split."""
        exchanged = max(record.gradients + record.weights for record in like.records)
        for strategy in strategies:
            config = self._configured(split, strategy)
            if config is not None:
                yield self._cost(split.sizes, exchanged, trainer=config.trainer).total, config

    def _states(self, split: Split) -> tuple[tuple[StageState, ...], tuple[StageState, ...]] | None:
        """Returns the stage states of the policy and of a critic on its ranks; None if a rule forbids the split."""
        config = with_trainer(self.config, {**split.fields, **STRATEGIES[0].fields})
        if config is None:
            return None
        rules = (*TRAINED, *self.spec.layer_kind.split_rules())
        if broken(rules, config.facts | {"spec": self.spec, "sizes": split.sizes}):
            return None
        states = stage_states(config.trainer, self.holdings, self.spec, split.sizes, quick=True)
        if self.critic is None:
            return states, ()
        trunk, critic_holdings = self.critic
        trainer = config.as_critic().trainer
        return states, stage_states(trainer, critic_holdings, trunk, split.sizes, model="critic", quick=True)

    def _configured(self, split: Split, strategy: ActivationStrategy) -> Config | None:
        """Returns the configuration with this split and strategy; None if a rule does not allow it."""
        fields = {**split.fields, **strategy.fields}
        if strategy.moments is not None:
            fields["optimizer"] = {**self.config.trainer.optimizer.model_dump(), "offload_fraction": strategy.moments}
        config = with_trainer(self.config, fields)
        if config is None or not allowed(config.facts | {"spec": self.spec, "device": self.device}):
            return None
        return config

    def _weigh(self, split: Split, config: Config, states: tuple[tuple[StageState, ...], ...]) -> Candidate:
        """Returns `config` as a candidate with memory and cost. `states`: stage states of policy and critic."""
        merging = most_merging(config, max(stage.state.adapted for stage in states[0]))
        records = trainer_memory(config, self.spec, split.sizes, self.device, merging=merging, states=states[0])
        fullest = max(records, key=lambda record: record.peak)
        cost = self._cost(
            split.sizes,
            fullest.gradients + fullest.weights,
            hosted=fullest.host_optimizer,
            offloaded=max(record.moved for record in records),
            trainer=config.trainer,
        )
        critics: tuple[TrainerMemory, ...] = ()
        if self.critic is not None:
            critics = trainer_memory(
                config.as_critic(), self.critic[0], split.sizes, self.device, model="critic", states=states[1]
            )
        return Candidate(config, records, critics, cost)

    def _problems(self, candidate: Candidate) -> list[SlimxError]:
        """Returns the errors that the rules about memory report. Buckets are not counted, because no publication is
        compiled here."""
        config = candidate.config
        trainers = candidate.records + candidate.critics
        occupied = max(record.away for record in candidate.records)
        engines = tuple(with_occupied(engine, config, group, self.machine, occupied) for group, engine in self.engines)
        phases = phase_memory(
            self.machine,
            trainers,
            engines,
            separate_critic=False,
            colocate=bool(engines),
            offload=config.trainer.offload,
        )
        graphs = max((engine.graphs for engine in engines), default=0)
        host = host_memory(config, self.machine, trainers, None, separate_critic=False, graphs=graphs)
        facts = {"trainer_memory": trainers, "engine_memory": engines, "phases": phases, "host": host}
        return broken(MEMORY_RULES, config.facts | facts | {"machine": self.machine})

    def _suggested(self, candidate: Candidate) -> Suggestion:
        ranks, _ = by_gpu(candidate.records + candidate.critics, separate_critic=False)
        peak = max(map(peak_of, ranks))
        trainer = candidate.config.trainer
        names = {"TP": trainer.tensor, "PP": trainer.pipeline, "VPP": trainer.virtual_pipeline, "CP": trainer.context}
        names |= {"EP": trainer.expert, "ETP": trainer.expert_tensor_size, "DP": trainer.data_size}
        factors = []
        for name, size in names.items():
            if size > 1 or name == "TP":
                factors.append(f"{name}{size}")
        layout = " x ".join(factors)
        recompute = trainer.recompute
        layout += f", recompute {recompute.granularity}"
        if recompute.granularity == "selective":
            layout += f" ({', '.join(recompute.modules)})"
        fraction = recomputed_fraction(self.spec, self.config.rollout.longest, trainer)
        if fraction:
            layout += f" ({fraction:.1%} more FLOPs)"
        if trainer.offload_activations:
            layout += f", offload {', '.join(trainer.offload_activations)} to the host"
        offloaded = trainer.optimizer.offload_fraction
        if offloaded:
            layout += f", {offloaded:.0%} of the moments in host memory"
        return Suggestion(
            overrides=_overrides(self.config, candidate.config),
            layout=layout,
            trainer_peak=peak,
            margin=self.gpu_memory - peak,
            cost=round(candidate.cost.total, 4),
            recomputed=round(fraction, 4),
            why=candidate.cost.why,
        )


def with_trainer(config: Config, fields: Fields) -> Config | None:
    """Returns `config` with the values `fields` set in its section `trainer`; None if the section is then invalid."""
    try:
        trainer = Trainer.model_validate({**config.trainer.model_dump(), **fields})
    except ValidationError:
        return None
    return config.model_copy(update={"trainer": trainer})


def _overrides(config: Config, tried: Config) -> tuple[str, ...]:
    """Returns a command-line override for every field of section `trainer` in which `tried` differs from `config`."""
    before = config.trainer.model_dump(mode="json")
    after = tried.trainer.model_dump(mode="json")
    out = []
    for key, value in after.items():
        if key == "optimizer":
            if value["offload_fraction"] != before[key]["offload_fraction"]:
                out.append(f"trainer.optimizer.offload_fraction={value['offload_fraction']:g}")
        elif key == "recompute":
            for name, setting in value.items():
                if setting != before[key][name]:
                    out.append(f"trainer.recompute.{name}={_yaml(setting)}")
        elif value != before[key]:
            out.append(f"trainer.{key}={_yaml(value)}")
    return tuple(out)


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _distance(trainer: Trainer, fields: Fields) -> float:
    """Returns the total number of doublings and halvings that turn the sizes in `trainer` into those in `fields`."""
    changes = [(fields["expert_tensor"] or fields["tensor"]) / trainer.expert_tensor_size]
    keys = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert")
    changes += [fields[key] / getattr(trainer, key) for key in keys]
    return sum(abs(log2(change)) for change in changes)
