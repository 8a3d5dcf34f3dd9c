"""Tiny models, and by plain torch operations what each rank of a trainer must hold of them: the oracle of the layouts.

Nothing here reads the weight tables' maps or rectangles, `slimx.layout.ranks` or a plan.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slimx.extras.families import deepseek_v3, glm4_moe, minimax_m2
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.parts import Part
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.families import qwen3_moe
from slimx.reshard.plan.copy_plan import Plan

# No two dimensions alike and no square matrix, so that a transposed or exchanged one cannot pass.
QWEN: dict[str, Any] = {
    "hidden_size": 12,
    "head_dim": 6,
    "vocab_size": 140,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 132,
    "hidden_size": 28,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 18,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
}
GLM: dict[str, Any] = QWEN | {
    "intermediate_size": 36,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}
MINIMAX: dict[str, Any] = QWEN | {
    "intermediate_size": 20,
    "num_local_experts": 4,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "rotary_dim": 4,
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Model:
    """A tiny model and its tables."""

    hf: dict[str, Any]
    table: Table
    mtp: int = 0
    """Layers of multi-token prediction that are built."""

    @property
    def latent(self) -> bool:
        """DeepSeek's attention, or query groups."""
        return "kv_lora_rank" in self.hf

    @property
    def layers(self) -> int:
        return self.hf["num_hidden_layers"]


MODELS = {
    "qwen": Model(QWEN, qwen3_moe.weight_table(QWEN)),
    "deepseek": Model(DEEPSEEK, deepseek_v3.weight_table(DEEPSEEK)),
    "deepseek-mtp": Model(DEEPSEEK, deepseek_v3.weight_table(DEEPSEEK, 1), 1),
    "glm": Model(GLM, glm4_moe.weight_table(GLM, 1), 1),
    "minimax": Model(MINIMAX, minimax_m2.weight_table(MINIMAX)),
}


@functools.cache
def checkpoint(model: Model) -> Tensors:
    """Returns a checkpoint in which the elements are numbered from 1."""
    out, start = {}, 1
    for name, shape in model.table.checkpoint_shapes().items():
        out[name] = torch.arange(start, start + math.prod(shape)).view(shape)
        start += math.prod(shape)
    return out


# Covering arrays ------------------------------------------------------------------------------------------------------


def covering(strength: int, values: Sequence[Iterable[Any]], valid: Callable[..., bool]) -> list[tuple]:
    """Returns few valid cases in which every `strength` values that can meet do meet: greedy, always the same."""
    rest = [case for case in itertools.product(*values) if valid(*case)]
    tuples = {case: set(itertools.combinations(enumerate(case), strength)) for case in rest}
    missing, out = set().union(*tuples.values()), []
    while missing:
        best = max(rest, key=lambda case: len(tuples[case] & missing))
        missing -= tuples[best]
        out.append(best)
    return out


def _fits(tensor: int, pipeline: int, virtual: int, expert: int, expert_tensor: int, context: int, data: int) -> bool:
    stage = tensor * context * data
    return stage * pipeline <= 16 and stage % (expert * expert_tensor) == 0 and (virtual == 1 or pipeline > 1)


def layouts(strength: int) -> list[Sizes]:
    """Returns layouts in one of which every `strength` parallel sizes meet that can do so on at most 16 ranks."""
    values = [(1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4)]
    names = "tensor", "pipeline", "virtual", "expert", "expert_tensor", "context", "data"
    return [Sizes(**dict(zip(names, case, strict=True))) for case in covering(strength, values, _fits)]


LAYOUTS = layouts(2)


def name_of(sizes: Sizes) -> str:
    return (
        f"TP{sizes.tensor}PP{sizes.pipeline}x{sizes.virtual}EP{sizes.expert}ETP{sizes.expert_tensor}"
        f"CP{sizes.context}DP{sizes.data}"
    )


def split_of(model: Model, sizes: Sizes) -> tuple[int, ...]:
    """Splits layers over stages: unevenly if there are more stages than layers or an even split would be too easy."""
    stages = sizes.pipeline * sizes.virtual
    base, more = divmod(model.layers, stages)
    out = [base + (stage < more) for stage in range(stages)]
    if out[0] > 1 and stages > 1:
        out[0], out[-1] = out[0] - 1, out[-1] + 1
    return tuple(out)


# Megatron -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A rank's place by megatron-core's own groups."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def places(sizes: Sizes) -> list[Place]:
    """Returns the place of every rank, as `parallel_state.initialize_model_parallel` makes the groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that megatron-core would use on CUDA
        from megatron.core.parallel_state import RankGenerator

    order, replicas = "tp-cp-ep-dp-pp", sizes.stage // (sizes.expert * sizes.expert_tensor)
    dense = RankGenerator(sizes.tensor, 1, sizes.data, sizes.pipeline, sizes.context, order)
    sparse = RankGenerator(sizes.expert_tensor, sizes.expert, replicas, sizes.pipeline, 1, order)

    def index(generator: RankGenerator, token: str) -> dict[int, int]:
        return {rank: i for group in generator.get_ranks(token) for i, rank in enumerate(group)}

    columns = [index(dense, "tp"), index(dense, "pp"), index(sparse, "ep"), index(sparse, "tp")]
    return [Place(*(column[rank] for column in columns)) for rank in range(sizes.world)]


def megatron_rank(model: Model, whole: Tensors, sizes: Sizes, place: Place, split: Sequence[int]) -> Tensors:
    """Returns local name -> tensor of what the rank at `place` holds, copies included."""
    out: Tensors = {}
    stages = sizes.pipeline * sizes.virtual
    for chunk in range(sizes.virtual):
        stage = chunk * sizes.pipeline + place.pipeline
        tensors = dict(
            _chunk(model, whole, sizes, place, sum(split[:stage]), split[stage], stage == 0, stage + 1 == stages)
        )
        out |= {f"{chunk}.{name}" if sizes.virtual > 1 else name: tensor for name, tensor in tensors.items()}
    return out


def _chunk(
    model: Model, whole: Tensors, sizes: Sizes, place: Place, start: int, count: int, first: bool, last: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    attention = _latent_attention if model.latent else _grouped_attention

    def layer(hf: dict[str, Any], *at: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from attention(hf, *at)
        yield from _mlp(hf, *at)

    embedding = whole["model.embed_tokens.weight"].chunk(sizes.tensor)[place.tensor]
    if first:
        yield "embedding.word_embeddings.weight", embedding
    for local in range(count):
        for name, tensor in layer(model.hf, whole, sizes, place, start + local):
            yield f"decoder.layers.{local}.{name}", tensor
    if last:
        yield "decoder.final_layernorm.weight", whole["model.norm.weight"]
        yield "output_layer.weight", whole["lm_head.weight"].chunk(sizes.tensor)[place.tensor]
    if last and model.mtp:
        # A rank that has both ends holds the embedding once; chunks are modules of their own all the same.
        if sizes.pipeline > 1:
            yield "embedding.word_embeddings.weight", embedding
        here, there = "mtp.layers.0.", f"model.layers.{model.layers}."
        for norm, name in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            yield f"{here}{norm}.weight", whole[f"{there}{name}.weight"]
        yield here + "eh_proj.weight", whole[there + "eh_proj.weight"].chunk(sizes.tensor)[place.tensor]
        for name, tensor in layer(model.hf, whole, sizes, place, model.layers):
            yield f"{here}mtp_model_layer.{name}", tensor


def _grouped_attention(
    hf: dict[str, Any], whole: Tensors, sizes: Sizes, place: Place, layer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    there = f"model.layers.{layer}."
    groups, head, hidden = hf["num_key_value_heads"], hf["head_dim"], hf["hidden_size"]
    query, key, value = (whole[f"{there}self_attn.{kind}_proj.weight"].view(groups, -1, head, hidden) for kind in "qkv")
    fused = torch.cat([query, key, value], dim=1)  # [groups, query heads + key + value, head, hidden]
    yield "self_attention.linear_qkv.weight", fused.chunk(sizes.tensor)[place.tensor].reshape(-1, hidden)
    yield "self_attention.linear_qkv.layer_norm_weight", whole[there + "input_layernorm.weight"]
    if hf.get("attention_bias"):
        biases = [whole[f"{there}self_attn.{kind}_proj.bias"].view(groups, -1, head) for kind in "qkv"]
        bias = torch.cat(biases, dim=1).chunk(sizes.tensor)[place.tensor]
        yield "self_attention.linear_qkv.bias", bias.flatten()
    for kind in "qk":
        norm = whole[f"{there}self_attn.{kind}_norm.weight"]
        local = norm if len(norm) == head else norm.chunk(sizes.tensor)[place.tensor]
        yield f"self_attention.{kind}_layernorm.weight", local
    yield (
        "self_attention.linear_proj.weight",
        whole[there + "self_attn.o_proj.weight"].chunk(sizes.tensor, 1)[place.tensor],
    )


def _latent_attention(
    hf: dict[str, Any], whole: Tensors, sizes: Sizes, place: Place, layer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    there = f"model.layers.{layer}."
    attention, rank = there + "self_attn.", place.tensor
    yield "input_layernorm.weight", whole[there + "input_layernorm.weight"]
    for name, source in (("linear_q", "q_a_proj"), ("linear_kv", "kv_a_proj_with_mqa")):
        yield f"self_attention.{name}_down_proj.weight", whole[f"{attention}{source}.weight"]
    for name, kind in (("linear_q", "q"), ("linear_kv", "kv")):
        yield f"self_attention.{name}_up_proj.layer_norm_weight", whole[f"{attention}{kind}_a_layernorm.weight"]
        heads = whole[f"{attention}{kind}_b_proj.weight"].chunk(sizes.tensor)
        yield f"self_attention.{name}_up_proj.weight", heads[rank]
    yield "self_attention.linear_proj.weight", whole[attention + "o_proj.weight"].chunk(sizes.tensor, 1)[rank]


def _mlp(
    hf: dict[str, Any], whole: Tensors, sizes: Sizes, place: Place, layer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    there, rank = f"model.layers.{layer}.", place.tensor
    if layer < hf.get("first_k_dense_replace", 0):
        yield "mlp.linear_fc1.layer_norm_weight", whole[there + "post_attention_layernorm.weight"]
        yield from _swiglu(whole, "mlp.linear_fc{}.weight", there + "mlp", sizes.tensor, rank)
        return
    yield "pre_mlp_layernorm.weight", whole[there + "post_attention_layernorm.weight"]
    there += "block_sparse_moe." if "num_local_experts" in hf else "mlp."
    yield "mlp.router.weight", whole[there + "gate.weight"]
    if "num_local_experts" in hf:
        yield "mlp.router.expert_bias", whole[there + "e_score_correction_bias"]
    elif "n_routed_experts" in hf:
        yield "mlp.router.expert_bias", whole[there + "gate.e_score_correction_bias"]
        yield from _swiglu(whole, "mlp.shared_experts.linear_fc{}.weight", there + "shared_experts", sizes.tensor, rank)
    # Expert parallelism has no numbers of its own in the checkpoint: ranks take runs of equal length.
    for local, expert in enumerate(torch.arange(experts_of(hf)).chunk(sizes.expert)[place.expert].tolist()):
        name = "mlp.experts.linear_fc{}.weight" + str(local)
        yield from _swiglu(whole, name, f"{there}experts.{expert}", sizes.expert_tensor, place.expert_tensor)


def experts_of(hf: dict[str, Any]) -> int:
    return next(hf[key] for key in ("num_local_experts", "n_routed_experts", "num_experts") if key in hf)


def swiglu(whole: Tensors, source: str, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate over up, and down, of the MLP `source`: the share of rank `rank` of `size`."""
    kinds = ("w1", "w3", "w2") if "block_sparse_moe" in source else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (whole[f"{source}.{kind}.weight"] for kind in kinds)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]), down.chunk(size, 1)[rank]


def _swiglu(whole: Tensors, name: str, source: str, size: int, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, matrix in enumerate(swiglu(whole, source, size, rank), 1):
        yield name.format(number), matrix


def trainer_shards(model: Model, sizes: Sizes) -> list[Tensors]:
    """Returns the tensors of every trainer rank, layers split as `split_of` says."""
    whole, split = checkpoint(model), split_of(model, sizes)
    return [megatron_rank(model, whole, sizes, place, split) for place in places(sizes)]


# What a part says -----------------------------------------------------------------------------------------------------


def fill(part: Part, whole: Tensors) -> torch.Tensor:
    """Returns the local tensor that a part describes, rectangle by rectangle; 0 where none is. None may overlap."""
    local = torch.zeros(part.shape, dtype=torch.int64)
    matrix = local.view(-1, 1) if local.dim() == 1 else local.view(-1, local.shape[-1])
    for r in part.rects:
        source = whole[part.sources[r.source]]
        source = source.view(-1, 1) if source.dim() == 1 else source.view(-1, source.shape[-1])
        block = source[r.row : r.row + r.rows * r.step : r.step, r.col : r.col + r.cols]
        place = matrix[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols]
        assert place.shape == block.shape and not place.any(), f"{part.name} is written twice, or beyond its edge"
        place.copy_(block)
    return local


def by_rank(parts: Iterable[Part], world: int) -> list[dict[str, Part]]:
    """Returns name -> part of each rank; no rank may hold two of one name, nor be named twice."""
    out: list[dict[str, Part]] = [{} for _ in range(world)]
    for part in parts:
        for rank in part.ranks:
            assert part.name not in out[rank], f"rank {rank} holds {part.name} twice"
            out[rank][part.name] = part
    return out


def assert_same(found: Tensors, expected: Tensors, where: str) -> None:
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{where}: {name}"


def bytes_read(plan: Plan) -> np.ndarray:
    """Returns the bytes [sources, targets] that each rank reads of its parameters for each target."""
    out = np.zeros((int(plan.moved["source"].max(initial=0)) + 1, plan.targets), dtype=np.int64)
    itemsize = np.array([ITEMSIZE[p.dtype] for p in plan.parameters], dtype=np.int64)[plan.moved["parameter"]]
    nbytes = plan.moved["rows"].astype(np.int64) * plan.moved["cols"] * itemsize
    np.add.at(out, (plan.moved["source"], plan.moved["target"]), nbytes)
    return out
