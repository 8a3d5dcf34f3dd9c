"""Activations of a pipeline rank: what its layers keep, over the micro-batches in flight, and what comes on top.

kept      layers (as recomputation leaves them) x micro-batches in flight, on the last stage the head's input
on top    the larger of: the logits of a chunk of tokens; the layer whose gradients are being computed, with all its
          activations where it is recomputed
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.activations import FP32, LayerBytes, Setting, layer_bytes
from slimx.extras.planner.memory.modules import copied, left_out, offloaded, recomputed
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.layer_kind import LayerParts

LOGIT_BYTES = 12
"""Per logit of a chunk: itself, its exponential and their product, in fp32 (`slimx.trainer.model.logprobs`)."""
CHUNK_BYTES, SMALLEST_CHUNK = 256 * 2**20, 128
"""As in `slimx.trainer.model.logprobs`, which a process without torch cannot import; a test compares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of activations of one trainer rank."""

    kept: int
    """Between forward and backward pass, all micro-batches in flight."""
    head: int
    """While the loss is computed: logits of a chunk and the gradient of the output layer (last stage; else 0)."""
    work: int
    """While the gradients of the fullest layer are computed."""
    in_flight: int
    """Micro-batches, of a whole stage's layers or, with virtual stages, of a chunk's."""
    hosted: int
    """On the host at the peak (`trainer.offload_activations`)."""
    moved: int
    """Copied to the host, and back, for each micro-batch."""
    parts: dict[str, int]
    """By name of a module that can be computed again (`trainer.recompute.modules`) or offloaded (`offload NAME`): what
    it takes off `kept` alone, if nothing else is recomputed or offloaded."""

    @property
    def peak(self) -> int:
        return self.kept + max(self.head, self.work)


def activation_bytes(
    spec: ModelSpec, trainer: Trainer, sizes: Sizes, setting: Setting, *, place: int, microbatches: int
) -> ActivationBytes:
    """Activations of pipeline rank `place`, in a step of `microbatches` micro-batches."""
    model = spec.transformer
    every = _each_layer(spec, setting)
    counts = sizes.split or (spec.table.layers // sizes.stages,) * sizes.stages
    kept = work = hosted = 0.0
    parts: Counter[str] = Counter()
    units = in_flight(sizes, place, microbatches)
    for chunk, count in Counter(units).items():
        stage = chunk * sizes.pipeline + place
        first = sum(counts[:stage])
        layers = every[first : first + counts[stage]]
        held, top = _layers(layers, trainer)
        boundary = _boundary(model["hidden_size"], setting, stage, sizes)
        held += spec.layer_kind.microbatch_bytes(model, setting, range(first, first + counts[stage]))
        kept, work = kept + count * (held + boundary), max(work, top)
        for layer, number in _kinds(layers):
            number *= count
            hosted += number * copied(layer, trainer)
            parts.update({module: number * nbytes for module, nbytes in recomputed(layer).items()})
            parts.update(
                {f"offload {module}": number * each.freed for module, each in offloaded(layer, trainer).items()}
            )
    moved = 0.0
    for stage in range(place, sizes.stages, sizes.pipeline):
        first = sum(counts[:stage])
        own = _kinds(every[first : first + counts[stage]])
        moved += sum(number * copied(layer, trainer) for layer, number in own)
    head = 0.0
    if place == sizes.pipeline - 1:
        last = units.count(sizes.virtual - 1) if sizes.virtual > 1 else len(units)
        hidden = setting.tokens * model["hidden_size"]
        behind = kept
        # The decoder's last norm, its output gathered from the sequence's shards, and a few numbers per token.
        kept += last * (setting.norm(hidden / sizes.tensor) + hidden * setting.itemsize + 10 * FP32 * setting.tokens)
        head = _head(spec, trainer, setting)
        alike = LayerParts("attention", "experts" if spec.moe_layers else "dense")
        for _ in range(spec.table.mtp_layers):
            predicting = layer_bytes(model, setting, alike, spec.layer_kind)
            held, top = _layers([predicting], trainer)
            hosted, moved = hosted + last * copied(predicting, trainer), moved + copied(predicting, trainer)
            joined = 2 * setting.norm(hidden / sizes.tensor) + 3 * hidden / sizes.tensor * setting.itemsize
            kept += last * (held + joined + hidden * setting.itemsize + 10 * FP32 * setting.tokens)
            head = max(head, top)
        # When the layers' turn comes, what lies behind them is gone.
        work = max(0.0, work - (kept - behind) / last)
    return ActivationBytes(
        kept=round(kept),
        head=round(head),
        work=round(work),
        in_flight=len(units),
        hosted=round(hosted),
        moved=round(moved),
        parts={name: round(nbytes) for name, nbytes in parts.items() if nbytes},
    )


def _each_layer(spec: ModelSpec, setting: Setting) -> list[LayerBytes]:
    """Bytes of every decoder layer."""
    layers = spec.layer_kind.layers(spec.transformer)
    kinds = {parts: layer_bytes(spec.transformer, setting, parts, spec.layer_kind) for parts in set(layers)}
    return [kinds[parts] for parts in layers]


def _kinds(layers: list[LayerBytes]) -> list[tuple[LayerBytes, int]]:
    """Each kind of layer once, with how many there are; layers of a kind are one object."""
    counts = Counter(map(id, layers))
    return [(layer, counts[key]) for key, layer in {id(layer): layer for layer in layers}.items()]


def in_flight(sizes: Sizes, place: int, microbatches: int) -> list[int]:
    """The chunks of which pipeline rank `place` holds activations at its peak, one entry per micro-batch.

    1F1B holds a micro-batch for itself and every later rank (Narayanan et al., 2104.04473, section 2.2); interleaved
    stages hold 2 (P - p - 1) + (v - 1) P + 1 of a chunk each, first P of the first chunk, then P of the second, and so
    on (megatron-core's `get_pp_rank_microbatches`)."""
    if sizes.virtual == 1:
        return [0] * min(microbatches, sizes.pipeline - place)
    count = 2 * (sizes.pipeline - place - 1) + (sizes.virtual - 1) * sizes.pipeline + 1
    count = min(count, sizes.virtual * microbatches)
    return [unit // sizes.pipeline % sizes.virtual for unit in range(count)]


def _layers(layers: list[LayerBytes], trainer: Trainer) -> tuple[float, float]:
    """Bytes that `layers` of one micro-batch keep, and by how many their backward pass exceeds that at its fullest."""
    units = _units(layers, trainer)
    kept = sum(held for held, _ in units)
    before = excess = 0.0
    for held, top in units:  # in its turn, later units are gone
        before += held
        excess = max(excess, before + top - kept)
    return kept, excess


def _units(layers: list[LayerBytes], trainer: Trainer) -> list[tuple[float, float]]:
    """Per layer, or run of layers that are recomputed together: what is kept, and what comes on top in its turn."""
    plain = [(layer.total, layer.work) for layer in layers]
    recompute = trainer.recompute
    if recompute.granularity != "full":
        out_of = {id(layer): left_out(layer, trainer) for layer, _ in _kinds(layers)}
        away = [out_of[id(layer)] for layer in layers]  # and comes back in the layer's own backward pass
        return [(total - out, work + out) for (total, work), out in zip(plain, away, strict=True)]
    number = recompute.layers
    if recompute.method == "block":
        covered = [(layer.input, layer.total + layer.work) for layer in layers[:number]]
        return covered + plain[number:]
    runs = [layers[start : start + number] for start in range(0, len(layers), number)]
    return [(run[0].input, sum(layer.total for layer in run) + run[-1].work) for run in runs]


def _boundary(hidden: int, setting: Setting, stage: int, sizes: Sizes) -> float:
    """Bytes that a stage received and sent, kept beside its layers: megatron-core frees the sent ones, not on CPUs."""
    received = stage > 0
    sent = setting.kernels == "torch" and stage < sizes.stages - 1
    return (received + sent) * setting.share * hidden * setting.itemsize if sizes.pipeline > 1 else 0.0


def _head(spec: ModelSpec, trainer: Trainer, setting: Setting) -> float:
    vocabulary = spec.vocab_size / setting.sizes.tensor
    chunk = trainer.logprob_chunk_tokens or max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocabulary))
    logits = min(chunk, setting.tokens) * vocabulary
    weight = vocabulary * spec.transformer["hidden_size"]
    hidden = setting.tokens * spec.transformer["hidden_size"]
    # Forward, or backward with the gradients of the weight (fp32 sum, one product) and of its input.
    backward = logits * (2 * FP32 + setting.itemsize) + weight * (FP32 + setting.itemsize) + hidden * setting.itemsize
    return max(logits * LOGIT_BYTES, backward)
