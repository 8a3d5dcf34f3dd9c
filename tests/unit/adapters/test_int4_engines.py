"""SGLang reads the INT4 checkpoints that `slimx convert hf-to-int4` writes, and a publication brings its ranks the same
bytes: the codes and scales that were written, as Triton's kernel reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.extras.convert import run
from slimx.extras.low_precision.rules import has_kernels
from slimx.extras.planner.memory.engine import engine_memory
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes, sizes_of
from slimx.layout.table import Table
from slimx.models.families import read_model
from slimx.preflight.hardware import Machine
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.packed import PackedTensor
from slimx.reshard.plan.publication import publication_plan
from tests.checkpoint_stand import DEEPSEEK_V3, write_checkpoint
from tests.extras.convert.convert_stand import WIDE, go
from tests.function_call import call_with_sglang
from tests.integration.engine_families import MODELS as SERVED
from tests.refusals import refused
from tests.unit.adapters.sglang_ranks import built, join, pretend_hopper
from tests.unit.layout.layout_stand import Model, Tensors, checkpoint, trainer_shards
from tests.unit.reshard.packer_stand import is_bias, pack_all

QWEN3 = WIDE | {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
DEEPSEEK = DEEPSEEK_V3 | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "rope_scaling": {  # without any, SGLang's CPU builds no rotary embedding of pairs
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
}
KIMI = SERVED["kimi_k25"] | {"torch_dtype": "bfloat16"}
MODELS = {"qwen3": (QWEN3, 1), "deepseek": (DEEPSEEK, 0), "glm": (GLM, 1), "kimi": (KIMI, 1)}
"""Models, each with the rank of an engine that is looked at. Two have layers that SGLang fuses without saying so in its
class: dense ones and shared experts."""
MARLIN, TRITON = "CompressedTensorsWNA16MoE", "CompressedTensorsWNA16TritonMoE"
RANKS = 2


class Repacked(Exception):
    """Raised where codes are given to the kernel that arranges them for Marlin, which is compiled for a GPU."""


def repack(*_: Any) -> None:
    raise Repacked


def expected(files: Tensors, prefix: str, rank: int, world: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields each parameter of an engine's layer with codes or scales of the rank's share of each expert: [rows, words
    or groups]."""
    experts = sorted({int(name.split(".experts.")[1].split(".")[0]) for name in files if name.startswith(prefix)})
    for kind in ("packed", "scale"):
        up, down = [], []
        for expert in experts:
            parts = {m: files[f"{prefix}{expert}.{m}_proj.weight_{kind}"] for m in ("gate", "up", "down")}
            up.append(torch.cat([parts[m].chunk(world)[rank] for m in ("gate", "up")]))
            down.append(parts["down"].chunk(world, dim=1)[rank])
        yield f"w13_weight_{kind}", up
        yield f"w2_weight_{kind}", down


def loaded(path: str, rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint of slimx on one rank of SGLang's engine, as a server on Hopper does.

    Returns the "schemes" of its routed "layers"; their parameters after `load_weights` that are not the file's codes
    and scales ("wrong"); and what the rank holds when `process_weights_after_loading` has made them ready for the
    kernels ("held"): form and checksum of all that a publication in the engine's own layout writes, None where codes
    are rearranged.
    """
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as schemes

    schemes.gptq_marlin_moe_repack = repack
    pretend_hopper()
    model = built(join(path, rank, world, **arguments))
    files: Tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        files |= load_file(file)
    model.load_weights(iter(files.items()))
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "w13_weight_packed")}
    known = {name: dict(expected(files, f"{name}.", rank, world)) for name in layers}
    wrong = [
        f"{name}.{parameter}"
        for name, layer in layers.items()
        for parameter, experts in known[name].items()
        if not torch.equal(getattr(layer, parameter), torch.stack([expert.T for expert in experts]))
    ]
    scheme = {type(layer.scheme).__name__ for layer in layers.values()}
    try:
        for layer in layers.values():
            layer.scheme.process_weights_after_loading(layer)
    except Repacked:
        forms = None
    else:
        forms = forms_of(model)
    return {"layers": len(layers), "schemes": sorted(scheme), "wrong": wrong, "held": forms}


def forms_of(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    from slimx.adapters.sglang.weights.places import local_layout, weights_of

    layout, weights = local_layout(model), weights_of(model)
    assert not layout.uncovered, layout.uncovered
    return {name: (place.form, checksum_tensor(weights[name].data)) for name, place in layout.places.items()}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per model a directory with `bf16`, a checkpoint, and `int4`, what a conversion makes of it."""
    places = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, place in places.items():
        go(run.hf_to_int4(write_checkpoint(place / "bf16", MODELS[name][0])), place / "int4")
    return places


@pytest.fixture(scope="module")
def engines(places: dict[str, Path]) -> dict[tuple[str, bool], dict[str, Any]]:
    """Collects what ranks of engines hold, by model and whether Triton's kernels are asked for."""
    keys = [("qwen3", False), *((name, True) for name in MODELS)]
    engines = {}
    for name, triton in keys:
        arguments = {"moe_runner_backend": "triton"} if triton else {}
        engines[name, triton] = call_with_sglang(loaded, str(places[name] / "int4"), MODELS[name][1], RANKS, arguments)
    return engines


def config_of(place: Path) -> Config:
    """Returns a run of four trainer ranks, TP2 x EP2, that publishes INT4 to engines of two ranks."""
    engine = {"model": str(place / "int4"), "tensor": RANKS, "sglang": {"moe_runner_backend": "triton"}}
    return Config.model_validate(
        {
            "run": {"dir": "r"},
            "model": {"path": str(place / "bf16")},
            "numerics": {"dtype": "bfloat16"},
            "trainer": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 1, "qat": "int4"},
            "publish": {"quantize": "int4"},
            "rollout": {"prompts": "p", "engines": [engine]},
        }
    )


def published(place: Path, hf: dict[str, Any]) -> list[list[PackedTensor]]:
    """Packs the weights of the checkpoint on every trainer rank: what each engine rank is sent."""
    config, spec = config_of(place), read_model(place / "bf16")
    sizes = sizes_of(config.trainer)
    plan = publication_plan(config, spec, sizes, "cuda").plan
    files: Tensors = {}
    for file in sorted((place / "bf16").glob("*.safetensors")):
        files |= load_file(file)
    trainers = (
        split_by_layout(spec.table, sizes, files) if "text_config" in hf else split(Model(hf, spec.table), sizes, files)
    )
    out: list[list[PackedTensor]] = [[] for _ in range(RANKS)]
    for bucket, _ in pack_all(plan, trainers):
        for rank, tensors in enumerate(bucket.targets):
            out[rank] += tensors
    return out


def split_by_layout(table: Table, sizes: Sizes, files: Tensors) -> list[Tensors]:
    """Returns the tensors of every trainer rank as the layout of trainers says."""
    ranks: list[Tensors] = [{} for _ in range(sizes.world)]
    for part in MegatronLayout(table, sizes).parts():
        dtype = torch.float32 if is_bias(part.name) else torch.bfloat16
        local = torch.zeros(matrix(part.shape), dtype=dtype)
        for r in part.rects:
            source = files[part.sources[r.source]]
            piece = source.view(matrix(source.shape))[r.row : r.row + r.rows, r.col : r.col + r.cols]
            local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = piece
        for rank in part.ranks:
            ranks[rank][part.name] = local.view(part.shape)
    return ranks


def split(model: Model, sizes: Sizes, files: Tensors) -> list[Tensors]:
    """Returns the tensors of every trainer rank as plain operations of torch split them."""
    numbers = checkpoint(model)
    values = torch.zeros(1 + max(int(numbered.max()) for numbered in numbers.values()))
    for name, numbered in numbers.items():
        values[numbered] = files[name].float()
    return [
        {name: values[at].to(torch.float32 if is_bias(name) else torch.bfloat16) for name, at in tensors.items()}
        for tensors in trainer_shards(model, sizes)
    ]


def test_an_engine_that_starts_from_int4_loads_the_very_codes(engines):
    for (name, triton), engine in engines.items():
        hf, _ = MODELS[name]
        assert engine["schemes"] == [TRITON if triton else MARLIN]
        assert engine["wrong"] == []
        text = hf.get("text_config", hf)
        assert engine["layers"] == text["num_hidden_layers"] - text.get("first_k_dense_replace", 0)


def test_marlin_rearranges_codes_so_they_cannot_be_written(engines):
    """The rule publish.int4 asks for Triton's kernels."""
    assert engines["qwen3", False]["held"] is None


@pytest.mark.parametrize("name", MODELS)
def test_a_publication_gives_the_bytes_of_a_start_from_the_conversion(engines, places, name: str):
    hf, rank = MODELS[name]
    sent = {t.name: [f"{t.dtype}:{','.join(map(str, t.shape))}", t.checksum] for t in published(places[name], hf)[rank]}
    result = engines[name, True]
    assert sent == result["held"]
    assert sum(tensor.endswith("_packed") for tensor in sent) == 2 * result["layers"]


def test_a_plan_counts_the_bytes_of_codes_and_scales(places: dict[str, Path]) -> None:
    config, spec = config_of(places["deepseek"]), read_model(places["deepseek"] / "bf16")
    machine = Machine(gpu=None, memory=200 * 2**30, per_node=8, nodes=1, host_memory=None)
    planned = engine_memory(config, spec, config.rollout.engines[0], machine, staged=0)
    sent = [sum(t.nbytes for t in tensors) for tensors in published(places["deepseek"], DEEPSEEK)]
    assert planned.weights == max(sent)


def test_the_setting_that_excludes_the_engines_layout_is_named(places: dict[str, Path]) -> None:
    place = places["qwen3"]
    config = config_of(place)
    config.rollout.engines[0].sglang["enable_eplb"] = True
    with refused("publish.int4_encoding", about="publish.quantize"):
        publication_plan(config, read_model(place / "bf16"), sizes_of(config.trainer), "cuda")
    facts = config.facts | {"device": "cpu", "sizes": sizes_of(config.trainer)}
    assert ("publish.quantize_on_cpu", "publish.quantize") in {(p.code, p.about) for p in broken([has_kernels], facts)}
