"""Splits: combinations of tensor, pipeline, context, expert and data parallel sizes that the model allows for a given
number of trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from slimx.config.schema import Config
from slimx.layout.megatron import nearly_equal
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import Machine

SPLIT_TOKENS = 4096
"""Minimum number of tokens of the longest sequence that each rank must receive for context parallelism to be
suggested."""
Fields = dict[str, Any]
"""Field values for section `trainer` or for an engine group, by field name."""


def splits(config: Config, spec: ModelSpec, machine: Machine, world: int) -> Iterator[Fields]:
    """Yields the splits of `world` ranks that the model's layers and experts allow. Other dimensions of the model are
    checked later (`divides`)."""
    layers, experts = spec.table.layers, max(1, spec.experts)
    for tensor in _divisors(world, min(machine.domain, spec.transformer["num_query_groups"])):
        for pipeline in _divisors(world // tensor, layers):
            for context in _contexts(config, world // tensor // pipeline):
                data = world // tensor // pipeline // context
                stage = tensor * context * data
                for expert in _divisors(experts, stage):
                    for expert_tensor in sorted({1, tensor}) if expert > 1 else (tensor,):
                        if stage % (expert * expert_tensor):
                            continue
                        for virtual in _virtual(layers, pipeline):
                            counts = _stage_layers(spec, pipeline * virtual)
                            if not all(counts):
                                continue
                            yield {
                                "world_size": world,
                                "tensor": tensor,
                                "pipeline": pipeline,
                                "virtual_pipeline": virtual,
                                "layers_per_stage": counts if len(set(counts)) > 1 else None,
                                "context": context,
                                "data": None,
                                "expert": expert,
                                "expert_tensor": expert_tensor,
                            }


def _stage_layers(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each of `stages` stages, nearly equal: each stage starts at the allowed layer
    that is closest to an equal split."""
    layers = spec.table.layers
    fitting = spec.layer_kind.stage_starts(layers)
    edges = [0]
    for even in accumulate(nearly_equal(layers, stages)[:-1]):
        edges.append(min(fitting, key=lambda start: abs(start - even)))
    edges.append(layers)
    return tuple(end - start for start, end in pairwise(edges))


def _contexts(config: Config, ranks: int) -> list[int]:
    """Returns the context-parallel sizes to try for `ranks` ranks: 1, the configured size, and powers of two that leave
    at least `SPLIT_TOKENS` tokens of the longest sequence to each rank."""
    longest = config.rollout.longest
    sizes = {1}
    for size in powers_of_two(ranks, 64):
        if longest >= size * SPLIT_TOKENS:
            sizes.add(size)
    if ranks % config.trainer.context == 0:
        sizes.add(config.trainer.context)
    return sorted(sizes)


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def powers_of_two(number: int, largest: int) -> list[int]:
    """Returns the powers of two that divide `number` and do not exceed 512 or `largest`."""
    out = []
    for exponent in range(10):
        power = 2**exponent
        if power <= largest and number % power == 0:
            out.append(power)
    return out


def _virtual(layers: int, pipeline: int) -> tuple[int, ...]:
    if pipeline > 1 and layers >= 2 * pipeline:
        return (1, 2)
    return (1,)


def sizes_of_split(fields: Fields) -> Sizes:
    """Returns the parallel sizes of a split, as `slimx.layout.ranks.sizes_of` does for a section `trainer` with these
    fields."""
    stage = fields["world_size"] // fields["pipeline"]
    return Sizes(
        tensor=fields["tensor"],
        pipeline=fields["pipeline"],
        data=stage // (fields["tensor"] * fields["context"]),
        expert=fields["expert"],
        expert_tensor=fields["expert_tensor"] or fields["tensor"],
        context=fields["context"],
        virtual=fields["virtual_pipeline"],
        split=tuple(fields["layers_per_stage"] or ()),
    )


def divides(sizes: Sizes, spec: ModelSpec, rollouts: int) -> bool:
    """Returns True if `sizes` evenly divides the model's tensors, and every data-parallel rank receives at least one of
    the `rollouts` rollouts of an update.

    This is a fast filter without reasons; the rules about layout and flow in `slimx.rules` report a reason to users."""
    model = spec.transformer
    shared = [(spec.vocab_size, sizes.tensor), (model["num_query_groups"], sizes.tensor), (spec.experts, sizes.expert)]
    if spec.experts:
        shared.append((model["moe_ffn_hidden_size"], sizes.expert_tensor))
    return all(count % size == 0 for count, size in shared) and rollouts >= sizes.data
