"""Layouts that fit: every split of the trainer's ranks that the model allows, with the cheapest way to keep activations
that fits memory (all kept, parts computed again, parts on the host, layers computed again), ranked by
`slimx.extras.planner.plan.cost_model`.

`--suggest` keeps `trainer.world_size` and everything that decides what is learned (batch, precision, sequence lengths).
Where no split of so many ranks fits, it doubles them, up to 64 times.

    splits --> the model divides, weights and gradients alone fit --> most promising first --> memory, stage by stage
               (arithmetic: thousands in a tenth of a second)          (a few milliseconds each, TRIALS at most)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log2
from typing import Any, NamedTuple

from pydantic import ValidationError

from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.extras.planner.memory.engine import beside_trainer, engine_memory
from slimx.extras.planner.memory.node import host_memory
from slimx.extras.planner.memory.parameter_runs import Holdings
from slimx.extras.planner.memory.phases import by_gpu, peak_of, phase_memory
from slimx.extras.planner.memory.publication import most_merging
from slimx.extras.planner.memory.trainer import StageState, holdings, stage_states, trainer_memory
from slimx.extras.planner.memory_record import EngineMemory, TrainerMemory
from slimx.extras.planner.plan.cost_model import Cost, again, update_cost
from slimx.extras.planner.plan.keepings import KEEPINGS, Keeping, allowed
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
"""Rules of layouts that are searched, with words for a user."""
MEMORY_RULES = rules_in(memory)
KEPT = 5
"""Suggestions told."""
LARGEST = 64
"""Times trainer.world_size that is tried where nothing smaller fits."""
TRIALS = 300
"""Layouts whose memory is computed in one search, at most. A count, so that the answer does not depend on how busy the
machine is."""


class Split(NamedTuple):
    """A layout that may fit."""

    fields: Fields
    """Keys of the trainer section."""
    sizes: Sizes
    elements: int
    """Trained elements of the fullest rank."""


class Way(NamedTuple):
    """A split with one way to keep activations."""

    config: Config
    records: tuple[TrainerMemory, ...]
    critics: tuple[TrainerMemory, ...]
    """Beside the records, stage by stage."""
    cost: Cost


def suggest_layouts(
    config: Config, spec: ModelSpec, machine: Machine, device: str
) -> tuple[tuple[Suggestion, ...], Searched]:
    """The cheapest layouts that fit, best first, of each tensor and pipeline size the best; and how far the search
    went. Raises SlimxError where the GPUs are not named."""
    search = Search(config, spec, machine, device)
    best: dict[tuple[int, int], Suggestion] = {}
    for least, sizes, found in search.fitting(search.least_cost):
        costs = sorted(suggestion.cost for suggestion in best.values())
        if len(costs) >= KEPT and least > costs[KEPT - 1]:
            break  # this one and all that follow cost more
        if found is not None:
            key = sizes.tensor, sizes.pipeline
            best[key] = min(best.get(key, found), found, key=lambda suggestion: suggestion.cost)
    return tuple(sorted(best.values(), key=lambda suggestion: suggestion.cost)[:KEPT]), search.searched


def nearest_layout(
    config: Config, spec: ModelSpec, machine: Machine, device: str
) -> tuple[Suggestion | None, Searched]:
    """The layout that fits with the fewest and smallest changes of the configured sizes, None if there is none; and how
    far the search went."""
    search = Search(config, spec, machine, device)
    nearest: tuple[float, Suggestion] | None = None
    for distance, _, found in search.fitting(lambda split: _distance(config.trainer, split.fields)):
        if nearest is not None and distance > nearest[0]:
            break
        if found is not None and (nearest is None or found.cost < nearest[1].cost):
            nearest = distance, found
    return (nearest[1] if nearest else None), search.searched


def require_gpu(machine: Machine) -> None:
    """Raise SlimxError where the kind of GPU is not known."""
    if machine.gpu is None or machine.memory is None:
        raise SlimxError("layouts are searched for a kind of GPU: set cluster.gpu")


class Search:
    """Tries splits of the trainer's ranks. What ranks hold is counted once for all of them."""

    def __init__(self, config: Config, spec: ModelSpec, machine: Machine, device: str):
        require_gpu(machine)
        self.config, self.spec, self.machine, self.device = config, spec, machine, device
        groups = config.rollout.policy_engines if config.schedule.colocate else ()
        self.engines: tuple[tuple[Engines, EngineMemory], ...] = tuple(
            (group, engine_memory(config, spec, group, machine, staged=0)) for group in groups
        )
        """On the same GPUs as the trainer."""
        self.held = holdings(config.trainer, config.numerics, spec)
        self.critic: tuple[ModelSpec, Holdings] | None = None
        """The critic in the trainer's ranks, split as the trainer is; one on ranks of its own is left as it is."""
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
        """Extent of the search so far."""
        layouts = sum(map(len, self._splits.values()))
        return Searched(layouts=layouts, tried=self._tried, complete=self._tried < TRIALS)

    def fitting(self, promise: Callable[[Split], float]) -> Iterator[tuple[float, Sizes, Suggestion | None]]:
        """Tries splits in the order of `promise`, the least first, and tells what each turned out to be; those of the
        smallest world in which there are any that fit, and TRIALS of them at most."""
        for world in self._worlds:
            some = False
            ordered = sorted(((promise(split), split) for split in self._possible(world)), key=lambda each: each[0])
            for value, split in ordered:
                if self._tried == TRIALS:
                    return
                self._tried += 1
                found = self.fit(split)
                some = some or found is not None
                yield value, split.sizes, found
            if some:
                return

    def least_cost(self, split: Split) -> float:
        """Seconds of an update that it costs at least: with nothing recomputed."""
        return round(self._cost(split.sizes, split.elements * self._each).total, 4)

    def _cost(self, sizes: Sizes, exchanged: int, **beside: Any) -> Cost:
        return update_cost(self.config, self.spec, sizes, self.machine, exchanged=exchanged, **beside)

    @property
    def _each(self) -> int:
        """Bytes of weight and gradient of an element."""
        return ITEMSIZE[self.config.numerics.dtype] + 4

    def _possible(self, world: int) -> Iterator[Split]:
        """Splits of `world` ranks that the model divides by, and whose weights and gradients alone fit."""
        for fields in self._splits[world]:
            sizes = sizes_of_split(fields)
            if divides(sizes, self.spec, self.updates):
                split = Split(fields, sizes, self._fullest(sizes))
                if self._floor(split) <= self.machine.memory:
                    yield split

    def _fullest(self, sizes: Sizes) -> int:
        """Trained elements of the fullest rank."""
        alone = replace(sizes, context=1, data=sizes.expert * sizes.expert_tensor)
        if alone not in self._elements:
            self._elements[alone] = max(
                self.held.elements(alone, stage * alone.stage) for stage in self.held.unlike_stages(alone)
            )
        return self._elements[alone]

    def _floor(self, split: Split) -> int:
        """Bytes of a GPU's memory below which the split cannot be trained, whatever is recomputed or on the host."""
        overhead = OVERHEAD if self.device == "cuda" else 0
        static = split.elements * self._each
        training = static + overhead
        floor = training + self.config.trainer.memory_margin_mib * 2**20
        if self.engines:
            publishing = max(engine.weights for _, engine in self.engines)
            publishing += split.elements * ITEMSIZE[self.config.numerics.dtype]
            floor = max(floor, training + OVERHEAD, publishing + OVERHEAD + overhead)
        return floor

    def fit(self, split: Split) -> Suggestion | None:
        """The split with the cheapest way to keep activations that fits; None if it does not fit at all."""
        states = self._states(split)
        if states is None:
            return None
        first, *between, _ = KEEPINGS
        kept = self._kept(split, first)
        if kept is not None and not self._problems(least := self._weigh(split, kept, states)):
            return self._suggested(least)
        dropped = next(filter(None, (self._kept(split, keeping) for keeping in reversed(KEEPINGS))), None)
        if dropped is None:
            return None
        smallest = self._weigh(split, dropped, states)
        problems = self._problems(smallest)
        if any(each.code != "memory.host" for each in problems):
            return None  # on a GPU nothing is smaller
        best = None if problems else smallest
        # What it costs at least is known before the memory is.
        for promise, tried in sorted(self._promised(split, between, smallest), key=lambda each: each[0]):
            if best is not None and promise >= best.cost.total:
                break
            way = self._weigh(split, tried, states)
            if (best is None or way.cost.total < best.cost.total) and not self._problems(way):
                best = way
        return None if best is None else self._suggested(best)

    def _promised(self, split: Split, keepings: Sequence[Keeping], like: Way) -> Iterator[tuple[float, Config]]:
        """Seconds that each way costs at least, if nothing waited for the host; `like`: another way of this split."""
        exchanged = max(record.gradients + record.weights for record in like.records)
        for keeping in keepings:
            if (tried := self._kept(split, keeping)) is not None:
                yield self._cost(split.sizes, exchanged, trainer=tried.trainer).total, tried

    def _states(self, split: Split) -> tuple[tuple[StageState, ...], tuple[StageState, ...]] | None:
        """State of the policy's ranks and of the critic's; None for a split that a rule refuses."""
        tried = with_trainer(self.config, {**split.fields, **KEEPINGS[0].fields})
        if tried is None or broken(
            (*TRAINED, *self.spec.layer_kind.split_rules()),
            tried.sections | {"spec": self.spec, "sizes": split.sizes},
        ):
            return None
        own = stage_states(tried.trainer, self.held, self.spec, split.sizes, quick=True)
        if self.critic is None:
            return own, ()
        (trunk, held), trainer = self.critic, tried.as_critic().trainer
        return own, stage_states(trainer, held, trunk, split.sizes, model="critic", quick=True)

    def _kept(self, split: Split, keeping: Keeping) -> Config | None:
        """The configuration with one way to keep activations; None where a rule refuses it."""
        changed = {**split.fields, **keeping.fields}
        if keeping.moments is not None:
            changed["optimizer"] = {**self.config.trainer.optimizer.model_dump(), "offload_fraction": keeping.moments}
        tried = with_trainer(self.config, changed)
        facts = {"spec": self.spec, "device": self.device}
        return None if tried is None or not allowed(tried.sections | facts) else tried

    def _weigh(self, split: Split, tried: Config, states: tuple[tuple[StageState, ...], ...]) -> Way:
        merging = most_merging(tried, max(found.state.adapted for found in states[0]))
        records = trainer_memory(tried, self.spec, split.sizes, self.device, merging=merging, states=states[0])
        fullest = max(records, key=lambda record: record.peak)
        cost = self._cost(
            split.sizes,
            fullest.gradients + fullest.weights,
            hosted=fullest.host_optimizer,
            offloaded=max(record.moved for record in records),
            trainer=tried.trainer,
        )
        critics = ()
        if self.critic is not None:
            own = tried.as_critic()
            critics = trainer_memory(own, self.critic[0], split.sizes, self.device, model="critic", states=states[1])
        return Way(tried, records, critics, cost)

    def _problems(self, way: Way) -> list[SlimxError]:
        """Refusals by the rules about memory. Buckets of a publication are left out: they are not compiled for every
        layout."""
        trainers = way.records + way.critics
        beside = max(record.away for record in way.records)
        engines = tuple(
            beside_trainer(engine, way.config, group, self.machine, beside) for group, engine in self.engines
        )
        phases = phase_memory(
            self.machine,
            trainers,
            engines,
            critic_own=False,
            colocate=bool(engines),
            offload=way.config.trainer.offload,
        )
        graphs = max((engine.graphs for engine in engines), default=0)
        host = host_memory(way.config, self.machine, trainers, None, critic_own=False, graphs=graphs)
        weighed = {"trainer_memory": trainers, "engine_memory": engines, "phases": phases, "host": host}
        return broken(MEMORY_RULES, way.config.sections | weighed | {"machine": self.machine})

    def _suggested(self, way: Way) -> Suggestion:
        peak = max(map(peak_of, by_gpu(way.records + way.critics, critic_own=False)[0]))
        trainer = way.config.trainer
        names = {"TP": trainer.tensor, "PP": trainer.pipeline, "VPP": trainer.virtual_pipeline, "CP": trainer.context}
        names |= {"EP": trainer.expert, "ETP": trainer.expert_tensor_size, "DP": trainer.data_size}
        layout = " x ".join(f"{name}{size}" for name, size in names.items() if size > 1 or name == "TP")
        recompute = trainer.recompute
        modules = f" ({', '.join(recompute.modules)})" if recompute.granularity == "selective" else ""
        parts = f", on the host {', '.join(trainer.offload_activations)}" if trainer.offload_activations else ""
        offloaded = trainer.optimizer.offload_fraction
        host = f", {offloaded:.0%} of the moments on the host" if offloaded else ""
        length = self.config.rollout.longest
        share = again(self.spec, length, trainer)
        work = f" that is {share:.1%} of the FLOPs again" if share else ""
        return Suggestion(
            overrides=_overrides(self.config, way.config),
            layout=f"{layout}, recompute {recompute.granularity}{modules}{work}{parts}{host}",
            trainer_peak=peak,
            margin=self.machine.memory - peak,
            cost=round(way.cost.total, 4),
            again=round(share, 4),
            why=way.cost.why,
        )


def with_trainer(config: Config, fields: Fields) -> Config | None:
    """`config` with other fields of its trainer; None if they do not fit each other."""
    try:
        trainer = Trainer.model_validate({**config.trainer.model_dump(), **fields})
    except ValidationError:
        return None
    return config.model_copy(update={"trainer": trainer})


def _overrides(config: Config, tried: Config) -> tuple[str, ...]:
    """Arguments of the command line for everything that differs from the configuration."""
    before, after = (c.trainer.model_dump(mode="json") for c in (config, tried))
    out = []
    for key, value in after.items():
        if key == "optimizer":
            if value["offload_fraction"] != before[key]["offload_fraction"]:
                out.append(f"trainer.optimizer.offload_fraction={value['offload_fraction']:g}")
        elif value != before[key]:
            if key == "recompute":
                value = {name: v for name, v in value.items() if v != before[key][name]}
                out += [f"trainer.recompute.{name}={_yaml(v)}" for name, v in value.items()]
            else:
                out.append(f"trainer.{key}={_yaml(value)}")
    return tuple(out)


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _distance(trainer: Trainer, fields: Fields) -> float:
    """By how many doublings and halvings the sizes differ."""
    changes = [(fields["expert_tensor"] or fields["tensor"]) / trainer.expert_tensor_size]
    keys = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert")
    changes += [fields[key] / getattr(trainer, key) for key in keys]
    return sum(abs(log2(change)) for change in changes)
