"""Exact mode refuses what it cannot do, and a side that does not compute what it should is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import slimx
from slimx.engines.server.attestation import check_plugin, check_ranks
from slimx.engines.server.spec import EngineSpec, server_argv
from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.sglang import ranks as sglang_ranks
from slimx.extras.exact.adapters.sglang.blocks import LINEAR as BLOCK_LINEAR
from slimx.extras.exact.adapters.sglang.experts import BLOCKS, EXPERTS, GROUPED_TOP_K, TOP_K
from slimx.extras.exact.adapters.sglang.latent import CORE as LATENT_CORE
from slimx.extras.exact.adapters.sglang.numerics import (
    ATTENTION,
    LINEAR,
    LOG_SOFTMAX,
    NORM,
    ROTARY,
    ExactServer,
)
from slimx.extras.exact.mode import Exact
from slimx.numerics.mode import NumericsMode, mode_of, server_mode
from slimx.orchestration.step.measure import check_gap
from slimx.reshard.parties import PROTOCOL
from tests.extras.exact.run_config import config
from tests.refusals import refused
from tests.unit.engines.attestation_stand import attesting

SPEC = EngineSpec("e", "/model", "float32", "cpu", 31000, numerics=Exact(2))


def test_leaves_default_to_the_largest_tensor_parallel_size() -> None:
    assert mode_of(config()) == Exact(1) and mode_of(config(numerics={"mode": "fast"})) == NumericsMode()
    two = {"world_size": 4, "tensor": 2}
    assert mode_of(config(trainer=two)) == Exact(2)
    assert mode_of(config(trainer=two, rollout={"engines": [{"tensor": 4}]})) == Exact(4)
    assert mode_of(config(trainer=two, numerics={"mode": "exact", "leaves": 8})) == Exact(8)


def test_a_replay_sums_in_the_order_of_the_run_that_it_replays() -> None:
    engines = {"engines": [{"tensor": 4}, {"name": "judge", "frozen": True, "model": "/judge", "tensor": 8}]}
    replay = engines | {"replay": "/tmp/y"}
    assert mode_of(config(rollout=engines)) == mode_of(config(rollout=replay)) == Exact(4)


def test_log_probs_are_reused_only_if_the_runs_engines_sampled() -> None:
    assert config().engine_logprobs_exact
    assert not config(numerics={"mode": "fast"}).engine_logprobs_exact
    assert not config(schedule={"max_staleness": 1}).engine_logprobs_exact
    assert not config(rollout={"replay": "/tmp/y"}).engine_logprobs_exact


def test_a_server_gets_its_leaves_on_its_command_line() -> None:
    argv = server_argv(SPEC)
    assert server_mode(argv) == Exact(2) and argv[argv.index("--attention-backend") + 1] == ATTENTION
    assert "--disable-radix-cache" not in argv
    on_gpus = server_argv(replace(SPEC, device="cuda"))
    for argument in ("--disable-cuda-graph", "--enforce-disable-flashinfer-allreduce-fusion"):
        assert argument in on_gpus, "it would go around an operation"
    assert on_gpus[on_gpus.index("--moe-runner-backend") + 1] == "triton"
    assert server_mode(server_argv(replace(SPEC, numerics=NumericsMode()))) == NumericsMode()
    arguments = ["server.py", "--", "--exact-leaves", "4"]
    assert server_mode(arguments) == NumericsMode(), "an argument of SGLang's is not ours"


def test_a_server_with_another_contract_is_refused() -> None:
    same = exact.contract(leaves=2, dtype="float32")
    check_ranks([attesting(numerics=same)], SPEC)
    others = (exact.contract(leaves=4, dtype="float32"), same | {"version": 0}, None)
    for other in others:
        with refused("engine.numerics", about="e rank 1"):
            check_ranks([attesting(numerics=same), attesting(numerics=other)], SPEC)
    with refused("engine.numerics", about="e rank 0"):
        check_ranks([attesting(numerics=same)], replace(SPEC, numerics=NumericsMode()))


def test_a_server_in_which_nothing_was_registered_attests_it() -> None:
    nothing = SimpleNamespace(_hooks={}, _patched=set())
    assert Exact(1).in_force(nothing, torch.nn.Module()) == {ATTENTION: False}
    assert NumericsMode().in_force(nothing, torch.nn.Module()) == {}


def computing_by(method: str) -> torch.nn.Module:
    """Returns a layer with an SGLang method of this class."""
    layer = torch.nn.Module()
    layer.quant_method = type(method, (), {})()
    return layer


def test_an_operation_that_is_not_in_force_is_named() -> None:
    room = ExactServer(1)
    targets = (*room.replacements(), LOG_SOFTMAX)
    model = torch.nn.ModuleList([type("FusedMoE", (torch.nn.Module,), {})(), computing_by("UnquantizedLinearMethod")])
    room.calls.update([*targets, ATTENTION])
    registry = SimpleNamespace(_patched=set(targets))
    assert all(room.in_force(registry, model).values())
    registry._patched.discard(LINEAR)  # SGLang only logs a hook that fails
    room.calls[NORM] = 0  # replaced, but the model takes another path
    wrong = [target for target, good in room.in_force(registry, model).items() if not good]
    assert wrong == [NORM, LINEAR]
    rank = {"protocol": PROTOCOL, "slimx": slimx.__version__, "cpu": None, "pid": 7}
    with refused("engine.plugin_part", about=f"{NORM}, {LINEAR}"):
        check_plugin(rank | {"hooks": room.in_force(registry, model)}, "e")


MOE, GLM, LATENT = {"FusedMoE"}, {"FusedMoE", "Glm4MoeSparseMoeBlock"}, {"DeepseekV2AttentionMLA"}


@pytest.mark.parametrize(
    ("kinds", "target", "needed"),
    [
        (set(), EXPERTS, False),
        (set(), LOG_SOFTMAX, False),
        (set(), ROTARY, True),
        (set(), LINEAR, False),
        (set(), LATENT_CORE, False),
        (LATENT, ROTARY, False),
        (LATENT, LATENT_CORE, True),
        (MOE, TOP_K, True),
        (MOE, GROUPED_TOP_K, False),
        (GLM, TOP_K, False),
        (GLM, GROUPED_TOP_K, True),
        (GLM, BLOCKS["Glm4MoeSparseMoeBlock"], True),
        (GLM, BLOCKS["DeepseekV2MoE"], False),
    ],
)
def test_operations_must_have_been_called_where_the_model_has_them(kinds: set[str], target: str, needed: bool) -> None:
    room = ExactServer(1)
    room.calls.update([*room.replacements(), ATTENTION])
    room.calls[target] = 0
    registry = SimpleNamespace(_patched={*room.replacements(), LOG_SOFTMAX})
    model = torch.nn.ModuleList([type(kind, (torch.nn.Module,), {})() for kind in kinds])
    wrong = [name for name, good in room.in_force(registry, model).items() if not good]
    assert wrong == ([target] if needed else [])


def test_blocks_do_not_stand_for_an_unquantized_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.linear"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.layers.linear"].RowParallelLinear = type("RowParallelLinear", (), {})
    room, x = ExactServer(1), torch.randn(3, 8)
    layer = SimpleNamespace(weight=torch.randn(4, 8))
    registry = SimpleNamespace(_patched={*room.replacements(), LOG_SOFTMAX})
    blocks, plain = (computing_by(f"{kind}LinearMethod") for kind in ("Fp8", "Unquantized"))

    def in_force(*layers: torch.nn.Module) -> list[bool]:
        found = room.in_force(registry, torch.nn.ModuleList(layers))
        return [found[BLOCK_LINEAR], found[LINEAR]]

    assert in_force(blocks) == [False, True], "the model has no unquantized linear layer"
    by_blocks = room.replacements()[BLOCK_LINEAR](None, layer, x)
    assert in_force(blocks, plain) == [True, False], "its own entry was not called"
    assert torch.equal(room.replacements()[LINEAR](None, layer, x), by_blocks)
    assert in_force(blocks, plain) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_of_a_server_add_up_to_what_one_computes(
    dtype: torch.dtype, tensor: int, expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers `tensor` ranks that share an expert."""
    generator = torch.Generator().manual_seed(1)
    shapes = (5, 32), (4, 2 * 48, 32), (4, 32, 48)
    x, w13, w2 = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    ids, weights = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [1, 2]]), torch.rand(5, 2, generator=generator)
    context = ModuleType("sglang.srt.runtime_context")
    for name, module in (("sglang", ModuleType("a")), ("sglang.srt", ModuleType("b")), (context.__name__, context)):
        monkeypatch.setitem(sys.modules, name, module)

    def answer(rank: int, gathered: Any) -> torch.Tensor:
        monkeypatch.setattr(sglang_ranks, "gathered", gathered)
        place = SimpleNamespace(tp_group=None, tp_rank=rank)
        context.get_parallel = lambda: place
        columns = slice(rank % tensor * 48 // tensor, (rank % tensor + 1) * 48 // tensor)
        experts = slice(rank // tensor * 4 // expert, (rank // tensor + 1) * 4 // expert)
        local_w13, sizes = w13[experts], {"moe_tp_size": tensor, "moe_ep_size": expert}
        gate, up = local_w13.chunk(2, dim=1)
        layer = SimpleNamespace(
            w13_weight=torch.cat((gate[:, columns], up[:, columns]), dim=1),
            w2_weight=w2[experts][:, :, columns].contiguous(),
            **sizes,
        )
        local = torch.where(
            (ids >= experts.start) & (ids < experts.stop), ids - experts.start, -1
        )  # as SGLang has them
        choice = SimpleNamespace(topk_weights=weights, topk_ids=local)
        return ExactServer(2).experts.experts(layer, x, choice, None)

    ranks, parts = range(tensor * expert), []
    for rank in ranks:
        answer(rank, lambda part, group: [parts.append(part) or part] * len(ranks))
    first, *others = (answer(rank, lambda part, group: parts) for rank in ranks)
    whole = SimpleNamespace(w13_weight=w13, w2_weight=w2, moe_tp_size=1, moe_ep_size=1)
    choice = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    assert torch.equal(first, ExactServer(2).experts.experts(whole, x, choice, None))
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_half_of_attention_by_another_backend_is_refused(step: str) -> None:
    names = {f"{step}_attention_backend_str": ATTENTION for step in ("prefill", "decode")}
    runner = SimpleNamespace(**names | {f"{step}_attention_backend_str": "torch_native"})
    with refused("exact.backend", about=f"{step}_attention_backend"):
        ExactServer(1).attention_backend(runner)


def test_keys_and_values_are_stored_if_cuda_leaves_that_to_the_rotation() -> None:
    query, key, value = torch.randn(3, 3 * 16).chunk(3, dim=1)
    rotary, slots = SimpleNamespace(base=10000.0, rotary_dim=8, head_size=8), torch.tensor([4, 0, 2])
    kept = SimpleNamespace(value=value, k_buffer=torch.zeros(5, 16), v_buffer=torch.zeros(5, 16), cache_loc=slots)
    positions = torch.tensor([0, 7, 2])
    plain = ExactServer(1).rotary(rotary, positions, query, key)
    turned = ExactServer(1).rotary(rotary, positions, query, key, fused_set_kv_buffer_arg=kept)
    assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True)) and not torch.equal(plain[1], key)
    assert torch.equal(kept.k_buffer[slots], plain[1]) and torch.equal(kept.v_buffer[slots], value)
    assert not kept.k_buffer[[1, 3]].any()


def test_a_gap_ends_an_exact_run_and_no_other() -> None:
    metrics = {"gap/tokens": 12.0, "gap/max": 1e-7}
    for gap in (1e-7, float("nan")):
        with refused("numerics.gap", about="step 3"):
            check_gap(config(), metrics | {"gap/max": gap}, 3)
    check_gap(config(numerics={"mode": "fast"}), metrics, 3)
    check_gap(config(), metrics | {"gap/max": 0.0}, 3)
    check_gap(config(), {}, 3)
