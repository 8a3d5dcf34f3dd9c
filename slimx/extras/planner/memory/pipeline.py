"""Activations of a pipeline rank, in two parts:

kept      activations of its layers (without recomputed ones) for all micro-batches in flight, and on the last stage
          the input of the head
workspace the largest of three: the logits of a chunk of tokens; the gradients of the layer that needs the most, with
          all its activations if it is recomputed; or a vision tower's computation of a micro-batch's images"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.activations import FP32, LayerBytes, Setting, layer_bytes
from slimx.extras.planner.memory.modules import copied, left_out, offloaded, recomputed
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.layer_kind import LayerParts

LOGIT_BYTES = 12
"""Bytes per logit of a chunk of tokens, in fp32: the logit, its exponential and their product
(`slimx.trainer.model.logprobs`)."""
CHUNK_BYTES, SMALLEST_CHUNK = 256 * 2**20, 128
"""Bytes of logits per chunk, and minimum number of tokens in a chunk. They are copies of constants in
`slimx.trainer.model.logprobs`, which a process without torch cannot import; a test compares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of activations and of workspace on one trainer rank."""

    kept: int
    """Bytes kept between forward and backward pass, for all micro-batches in flight."""
    head: int
    """Bytes of workspace for the loss on the last stage: the logits of a chunk and the gradient of the output layer; 0
    on other stages."""
    work: int
    """Bytes of workspace for the gradients of the layer that needs the most, or for the embeddings of images."""
    in_flight: int
    """Number of micro-batches in flight. Each has activations of all layers of the stage or, with virtual stages, of
    one chunk."""
    hosted: int
    """Peak bytes of offloaded activations in host memory (`trainer.offload_activations`)."""
    moved: int
    """Bytes of activations copied to the host and back per micro-batch."""
    parts: dict[str, int]
    """Bytes of `kept` that would be saved if a single module were recomputed (key: its name in
    `trainer.recompute.modules`) or offloaded (key: `offload NAME`), and nothing else were recomputed or offloaded."""

    @property
    def peak(self) -> int:
        return self.kept + max(self.head, self.work)


def activation_bytes(
    spec: ModelSpec, trainer: Trainer, sizes: Sizes, setting: Setting, *, pipeline_rank: int, microbatches: int
) -> ActivationBytes:
    """Returns the activation memory of pipeline rank `pipeline_rank` in an update of `microbatches` micro-batches."""
    model = spec.transformer
    layers = _decoder_layers(spec, setting)
    counts = sizes.split or (spec.table.layers // sizes.stages,) * sizes.stages
    kept = 0.0
    work = 0.0
    hosted = 0.0
    moved = 0.0
    parts: defaultdict[str, float] = defaultdict(float)
    units = in_flight(sizes, pipeline_rank, microbatches)
    units_of_chunk = Counter(units)
    for chunk in range(sizes.virtual):
        stage = chunk * sizes.pipeline + pipeline_rank
        first = sum(counts[:stage])
        stage_layers = layers[first : first + counts[stage]]
        kinds = _kinds(stage_layers)
        copied_bytes = sum(number * copied(layer, trainer) for layer, number in kinds)
        moved += copied_bytes
        count = units_of_chunk[chunk]
        if count == 0:
            continue
        layers_kept, layers_work = _layers(stage_layers, trainer)
        if stage == 0:
            # Embeddings are computed before the layers keep anything of the micro-batch.
            layers_work = max(layers_work, spec.layer_kind.input_work(setting) - layers_kept)
        layers_kept += spec.layer_kind.microbatch_bytes(model, setting, range(first, first + counts[stage]))
        kept += count * (layers_kept + _boundary(model["hidden_size"], setting, stage, sizes))
        work = max(work, layers_work)
        hosted += count * copied_bytes
        for layer, number in kinds:
            for module, saved in _savings(layer, trainer).items():
                parts[module] += count * number * saved
    head = 0.0
    if pipeline_rank == sizes.pipeline - 1:
        last = units_of_chunk[sizes.virtual - 1]
        output = _output_layers(spec, trainer, setting)
        kept += last * output.kept
        hosted += last * output.copied
        moved += output.copied
        head = output.work
        # Activations after the decoder are freed before the decoder's backward pass.
        work = max(0.0, work - output.kept)
    rounded: dict[str, int] = {}
    for module, saved in parts.items():
        if saved:
            rounded[module] = round(saved)
    return ActivationBytes(
        kept=round(kept),
        head=round(head),
        work=round(work),
        in_flight=len(units),
        hosted=round(hosted),
        moved=round(moved),
        parts=rounded,
    )


def _savings(layer: LayerBytes, trainer: Trainer) -> dict[str, float]:
    """Returns the number of bytes saved by recomputing or offloading each module alone, by the names used in
    `ActivationBytes.parts`."""
    savings = recomputed(layer)
    for module, nbytes in offloaded(layer, trainer).items():
        savings[f"offload {module}"] = nbytes.freed
    return savings


class _OutputBytes(NamedTuple):
    """Bytes of one micro-batch after the decoder layers: the last norm, multi-token-prediction layers, and the head."""

    kept: float
    copied: float
    """Bytes of activations after the decoder layers that are copied to the host."""
    work: float
    """Bytes of temporary memory for computing the loss and its gradient."""


def _output_layers(spec: ModelSpec, trainer: Trainer, setting: Setting) -> _OutputBytes:
    hidden = setting.tokens * spec.transformer["hidden_size"]
    shard = hidden / setting.sizes.tensor
    # The norm's output, gathered from the shards of the sequence, and a few numbers per token.
    gathered = hidden * setting.itemsize + 10 * FP32 * setting.tokens
    kept = setting.norm(shard) + gathered
    copied_bytes = 0.0
    work = _head(spec, trainer, setting)
    if spec.table.mtp_layers > 0:
        parts = LayerParts("attention", "experts" if spec.moe_layers else "dense")
        layer = layer_bytes(spec.transformer, setting, parts, spec.layer_kind)
        layer_kept, layer_work = _layers([layer], trainer)
        joined = 2 * setting.norm(shard) + 3 * shard * setting.itemsize
        kept += spec.table.mtp_layers * (layer_kept + joined + gathered)
        copied_bytes = spec.table.mtp_layers * copied(layer, trainer)
        work = max(work, layer_work)
    return _OutputBytes(kept, copied_bytes, work)


def _decoder_layers(spec: ModelSpec, setting: Setting) -> list[LayerBytes]:
    """Returns the activations of every decoder layer; layers of the same kind share one object."""
    layers = spec.layer_kind.layers(spec.transformer)
    kinds = {parts: layer_bytes(spec.transformer, setting, parts, spec.layer_kind) for parts in set(layers)}
    return [kinds[parts] for parts in layers]


def _kinds(layers: list[LayerBytes]) -> list[tuple[LayerBytes, int]]:
    """Returns each kind of layer once, with the number of layers of that kind."""
    counts = Counter(map(id, layers))
    by_id = {id(layer): layer for layer in layers}
    return [(layer, counts[key]) for key, layer in by_id.items()]


def in_flight(sizes: Sizes, pipeline_rank: int, microbatches: int) -> list[int]:
    """Returns one entry for each micro-batch whose activations a pipeline rank keeps at its peak: the index of the
    model chunk to which these activations belong.

    1F1B keeps one micro-batch for the rank itself and one for every later rank (Narayanan et al., 2104.04473, section
    2.2). Interleaved stages keep 2 (P - p - 1) + (v - 1) P + 1 micro-batches of one chunk each: first P of the first
    chunk, then P of the second, and so on (megatron-core's `get_pp_rank_microbatches`)."""
    if sizes.virtual == 1:
        return [0] * min(microbatches, sizes.pipeline - pipeline_rank)
    count = 2 * (sizes.pipeline - pipeline_rank - 1) + (sizes.virtual - 1) * sizes.pipeline + 1
    count = min(count, sizes.virtual * microbatches)
    return [unit // sizes.pipeline % sizes.virtual for unit in range(count)]


def _layers(layers: list[LayerBytes], trainer: Trainer) -> tuple[float, float]:
    """Returns the number of bytes that `layers` keep for one micro-batch, and the maximum number of additional bytes
    that their backward pass needs at any time."""
    units = _units(layers, trainer)
    total = sum(kept for kept, _ in units)
    before = 0.0
    excess = 0.0
    for kept, work in units:  # the units after it have already been freed
        before += kept
        excess = max(excess, before + work - total)
    return total, excess


def _units(layers: list[LayerBytes], trainer: Trainer) -> list[tuple[float, float]]:
    """Returns, for each unit (a layer, or a group of layers that are recomputed together), the number of bytes that it
    keeps and the number of bytes of its workspace."""
    recompute = trainer.recompute
    if recompute.granularity != "full":
        restored = {id(layer): left_out(layer, trainer) for layer, _ in _kinds(layers)}  # in the backward pass
        return [(layer.total - restored[id(layer)], layer.work + restored[id(layer)]) for layer in layers]
    number = recompute.layers
    units: list[tuple[float, float]] = []
    if recompute.method == "block":
        for layer in layers[:number]:
            units.append((layer.input, layer.total + layer.work))
        for layer in layers[number:]:
            units.append((layer.total, layer.work))
        return units
    for start in range(0, len(layers), number):
        group = layers[start : start + number]
        units.append((group[0].input, sum(layer.total for layer in group) + group[-1].work))
    return units


def _boundary(hidden: int, setting: Setting, stage: int, sizes: Sizes) -> float:
    """Returns the total size in bytes of the stage's boundary tensors that are kept for the backward pass: the input
    that it receives and, on CPUs, the output that it sends, which megatron-core otherwise frees after sending."""
    if sizes.pipeline == 1:
        return 0.0
    tensors = 0
    if stage > 0:
        tensors += 1
    if setting.kernels == "torch" and stage < sizes.stages - 1:
        tensors += 1
    return tensors * setting.share * hidden * setting.itemsize


def _head(spec: ModelSpec, trainer: Trainer, setting: Setting) -> float:
    vocabulary = spec.vocab_size / setting.sizes.tensor
    chunk = trainer.logprob_chunk_tokens or max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocabulary))
    logits = min(chunk, setting.tokens) * vocabulary
    weight = vocabulary * spec.transformer["hidden_size"]
    hidden = setting.tokens * spec.transformer["hidden_size"]
    # Forward, or backward with the gradients of the weight (fp32 sum, one product) and of its input.
    backward = logits * (2 * FP32 + setting.itemsize) + weight * (FP32 + setting.itemsize) + hidden * setting.itemsize
    return max(logits * LOGIT_BYTES, backward)
