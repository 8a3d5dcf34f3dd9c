"""Predicted duration of one update: a simple estimate for ranking layouts that fit, not for predicting a run.

    compute   FLOPs of the rollouts (`slimx.models.flops`) and of recomputation, module by module, at 40% of the GPU's
              dense bf16 rate; and those of images, which the ranks of the first stage do not divide
    bubble    seconds that pipeline stages wait
    moved     bytes that a rank receives, over NVLink if the group fits its domain, else over the network: tensor
              (5 times the tokens of a projection and layer), experts (4 times the routed tokens), context (3 times
              keys and values; 2 times the inputs and outputs of a delta net), data (gradients and new weights),
              pipeline (2 times a stage's boundary)
    waits     copies of activations to the host beyond the forward pass, and back beyond the backward pass

It assumes that nothing else overlaps, that load is balanced and that all kernels are equally efficient, so layouts
that differ by less than a fifth should be treated as equal. No measurement has confirmed the predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from slimx.config.schema import Config
from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.memory.modules import recomputed_share
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.models.flops import sequence_flops
from slimx.preflight.hardware import Machine

EFFICIENCY = 0.4
ACTIVATION = 0.02
"""Assumed time of norms and activation functions (`layernorm` and `moe_act` together), which have no matrix products,
as a fraction of the time that an update's FLOPs take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted duration of one update in seconds, by cause."""

    compute: float
    bubble: float
    """Seconds for which pipeline ranks wait for each other."""
    moved: dict[str, float]
    """Seconds of communication, by kind of parallelism or by what is moved between GPU and host."""

    @property
    def total(self) -> float:
        return self.compute + self.bubble + sum(self.moved.values())

    @property
    def why(self) -> str:
        """Text that lists the three largest parts, such as "compute 2.10 s, experts 0.40 s"."""
        parts = {"compute": self.compute, "pipeline bubble": self.bubble, **self.moved}
        largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
        out = []
        for name, seconds in largest:
            if seconds >= 0.005:
                out.append(f"{name} {seconds:.2f} s")
        return ", ".join(out)


def update_cost(
    config: Config,
    spec: ModelSpec,
    sizes: Sizes,
    machine: Machine,
    *,
    exchanged: int,
    hosted: int = 0,
    offloaded: int = 0,
    trainer: Trainer | None = None,
) -> Cost:
    """Returns the predicted time of an update with the parallel sizes `sizes`.

    `exchanged`: bytes of gradients and weights on the fullest rank. `hosted`: bytes of that rank's moments in host
    memory. `offloaded`: bytes of activations that the rank copies to the host. `trainer`: recomputation settings; None
    for no recomputation. The type of GPU in `machine` must be known."""
    batch = batch_plan(config, sizes)
    gpu = machine.gpu
    assert gpu is not None
    model = spec.transformer
    itemsize = ITEMSIZE[config.numerics.dtype]
    flops = batch.rollouts_per_update * sequence_flops(model, spec.vocab_size, spec.layer_kind)(
        batch.tokens_per_rollout
    )
    # All stages wait for the one with the most layers.
    uneven = max(sizes.split, default=0) * sizes.stages / model["num_layers"] or 1.0
    once = uneven * flops / (sizes.world * gpu.flops * EFFICIENCY)
    compute = once
    if trainer is not None:
        compute *= 1 + recomputed_fraction(spec, batch.tokens_per_rollout, trainer)
    compute += batch.rollouts_per_update / sizes.data * spec.layer_kind.input_flops() / (gpu.flops * EFFICIENCY)

    def link(span: int) -> float:
        return gpu.nvlink if span <= machine.domain else gpu.network

    tokens = batch.rollouts_per_update * batch.tokens_per_rollout / (sizes.data * sizes.context)
    moved = _communication(spec, sizes, link, tokens=tokens, itemsize=itemsize, exchanged=exchanged)
    if hosted:
        moved["moments on the host"] = 2 * hosted / gpu.host
    if offloaded:
        seconds = offloaded / gpu.host
        moved["activations to the host"] = max(0.0, seconds - once / 3) + max(0.0, seconds - 2 * once / 3)
    busy = compute + sum(moved.values())
    bubble = busy * batch.bubble / (1 - batch.bubble)
    return Cost(compute=compute, bubble=bubble, moved=moved)


def _communication(
    spec: ModelSpec, sizes: Sizes, link: Callable[[int], float], *, tokens: float, itemsize: int, exchanged: int
) -> dict[str, float]:
    """Returns the seconds of communication between GPUs, by kind of parallelism.

    `link`: function that returns the rate for a group with a given number of ranks, in bytes per second. `tokens`:
    number of tokens per rank in an update. `itemsize`: bytes per element of activations. `exchanged`: bytes of
    gradients and weights per rank."""
    model = spec.transformer
    parts = spec.layer_kind.layers(model)
    mixers = Counter(layer.mixer for layer in parts)
    moe = len(spec.moe_layers) / sizes.pipeline
    width = tokens * model["hidden_size"] * itemsize
    t = sizes.tensor
    c = sizes.context
    e = sizes.expert * sizes.expert_tensor
    dense = sum(layer.mlp == "dense" for layer in parts) / sizes.pipeline
    projections = (len(parts) - mixers[None]) / sizes.pipeline + dense
    if model.get("moe_shared_expert_intermediate_size"):
        projections += moe
    moved = {"tensor": 5 * projections * width * (t - 1) / t / link(t)}
    if moe:
        chosen = model["moe_router_topk"] * sizes.expert_tensor * width / t
        moved["experts"] = 4 * moe * chosen * (e - 1) / e / link(e)
    if model.get("multi_latent_attention"):
        key = 2 * model["num_attention_heads"] / t * (model["qk_head_dim"] + model["qk_pos_emb_head_dim"])
    else:
        key = 2 * max(1, model["num_query_groups"] / t) * model["kv_channels"]
    around = 3 * mixers["attention"] / sizes.pipeline * (c - 1) * key
    if mixers["recurrent"]:
        around += 2 * mixers["recurrent"] / sizes.pipeline * (c - 1) / c * spec.layer_kind.exchanged(model) / t
    moved["context"] = tokens * around * itemsize / link(t * c)
    moved["data"] = (exchanged if sizes.stage > t else 0) / link(sizes.stage)
    if sizes.pipeline > 1:
        moved["pipeline"] = 2 * sizes.virtual * width / t / link(sizes.world)
    return moved


def recomputed_fraction(spec: ModelSpec, length: int, trainer: Trainer) -> float:
    """Returns the FLOPs of recomputation as a fraction of the FLOPs of an update without recomputation. `length`:
    sequence length in tokens."""
    selective = trainer.recompute.granularity == "selective"
    cheap = {"layernorm", "moe_act"} & {*trainer.recompute.modules} if selective else ()
    return recomputed_share(spec, length, trainer) + ACTIVATION * len(cheap) / 2
