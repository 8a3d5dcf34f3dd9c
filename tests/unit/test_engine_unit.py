"""Engines without a server: states, arguments, process trees, layout, receiver and client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp.web
import numpy as np
import psutil
import pytest
import torch
from torch import nn

from slimx.adapters import sglang_cpu, sglang_plugin, sglang_receiver
from slimx.adapters.sglang_layout import hf_layout
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout import control
from slimx.rollout.arguments import check_server_args, command_line, server_fields
from slimx.rollout.client import GenerationClient, ModelShape
from slimx.rollout.engine import TRANSITIONS, Engine, EngineSpec, State, server_argv
from slimx.rollout.process import LOOK_S, SupervisedProcess

CPU = EngineSpec("e", "/model", "float32", "cpu", 31000, max_total_tokens=512, seed=7)


# States and arguments -----------------------------------------------------------------------------------------------


def test_only_the_transitions_of_the_table_are_allowed(tmp_path: Path) -> None:
    for source in State:
        for target in State:
            engine = Engine(CPU, tmp_path / "log")
            engine.state = source
            if target in TRANSITIONS[source]:
                engine.move(target)
                assert engine.state is target
            else:
                with pytest.raises(SlimxError, match=f"engine e is {source} and cannot become {target}; from here"):
                    engine.move(target)


def test_dirty_weights_are_served_only_after_a_verification() -> None:
    assert TRANSITIONS[State.DIRTY] == {State.DIRTY, State.PAUSED, State.DEAD}
    assert State.READY not in TRANSITIONS[State.ASLEEP]


async def test_calls_in_a_wrong_state_are_refused_without_asking_the_server(tmp_path: Path) -> None:
    engine = Engine(CPU, tmp_path / "log")
    for state, call, needs in (
        (State.READY, engine.resume, "PAUSED"),
        (State.READY, engine.load, "PAUSED or DIRTY"),
        (State.DIRTY, engine.resume, "PAUSED"),
        (State.ASLEEP, engine.pause, "READY"),
        (State.READY, engine.sleep, "PAUSED"),
    ):
        engine.state = state
        with pytest.raises(SlimxError, match=f"engine e is {state}; {call.__name__} needs {needs}"):
            await call()


def test_a_cpu_server_gets_the_cpus_flags_and_a_gpu_server_does_not() -> None:
    cpu, gpu = server_argv(CPU), server_argv(replace(CPU, device="cuda", dtype="bfloat16", max_total_tokens=None))
    assert cpu[1:4] == ["-m", "slimx.rollout.server", "--"]
    for flag, value in (("--model-path", "/model"), ("--port", "31000"), ("--random-seed", "7"), ("--device", "cpu")):
        assert cpu[cpu.index(flag) + 1] == value
    for flag in ("--sleep-on-idle", "--disable-cuda-graph", "--attention-backend"):
        assert flag in cpu and flag not in gpu
    for flag in ("--enable-deterministic-inference", "--enable-return-routed-experts", "--custom-weight-loader"):
        assert flag in cpu and flag in gpu
    assert "--max-total-tokens" not in gpu


def test_users_arguments_reach_the_command_line_but_not_over_ours() -> None:
    argv = server_argv(replace(CPU, sglang={"log_level": "info", "chunked_prefill_size": 64, "sleep_on_idle": False}))
    assert argv[argv.index("--log-level") + 1] == "info" and argv[argv.index("--chunked-prefill-size") + 1] == "64"
    assert "--sleep-on-idle" not in argv
    with pytest.raises(SlimxError, match=r"rollout.engines.sglang.port is set by slimx \(31000\) for engine e"):
        server_argv(replace(CPU, sglang={"port": 1}))


def test_unknown_and_ill_typed_arguments_are_refused_with_the_nearest_name() -> None:
    for args, message in (
        ({"mem_fraction_sttic": 0.5}, "mem_fraction_sttic is not an argument of .*; did you mean mem_fraction_static?"),
        ({"tp-size": 2}, "did you mean tp_size?"),
        ({"qqqq_zzzz": 1}, "see python -m sglang.launch_server --help"),
        ({"tp_size": "2"}, r"tp_size is '2', but SGLang's field is of type int"),
        ({"mem_fraction_static": True}, "is True, but SGLang's field is of type Optional.float."),
        ({"sleep_on_idle": 1}, "is 1, but SGLang's field is of type bool"),
    ):
        with pytest.raises(SlimxError, match=message):
            check_server_args(args)


def test_arguments_are_read_without_importing_sglang() -> None:
    code = (
        "import sys; from slimx.rollout.engine import check_server_args\n"
        "check_server_args({'tp_size': 1}); print('sglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert {"tp_size", "custom_weight_loader", "enable_return_routed_experts"} <= server_fields().keys()


def test_lists_and_maps_become_arguments() -> None:
    args = {"served_model_name": "m", "custom_weight_loader": ["a.b", "c.d"], "enable_metrics": False, "dp_size": None}
    assert command_line(args) == ["--served-model-name", "m", "--custom-weight-loader", "a.b", "c.d"]


# Processes ----------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for depth in range(2):
    if os.fork() == 0:
        os.setsid()  # not in the group of its parent any more
        if os.fork():
            os._exit(0)  # and an orphan
print("up", flush=True)
time.sleep(600)
"""


def wait_for(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_stop_ends_a_stubborn_tree_with_its_orphans(tmp_path: Path) -> None:
    process = SupervisedProcess("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "log")
    process.start()
    wait_for(lambda: process.tail().count("up") == 4)
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) >= 4 and process.poll() is None
    start = time.monotonic()
    process.stop(grace_s=1)
    assert time.monotonic() - start < 8
    assert not [p for p in tree if p.is_running()] and process.poll() == 128 + signal.SIGKILL
    process.stop()


def test_a_killed_owner_or_guard_takes_the_tree_along(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom slimx.rollout.process import SupervisedProcess\n"
        f"p = SupervisedProcess('x', [sys.executable, '-c', {STUBBORN!r}], {str(tmp_path / 'log')!r})\n"
        "p.start(); print(p.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    guard = psutil.Process(int(owner.stdout.readline()))
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("up") == 4)
    tree = [guard, *guard.children(recursive=True)]
    owner.kill()
    owner.wait()
    gone, alive = psutil.wait_procs(tree, timeout=12)
    assert len(gone) >= 5 and not alive

    process = SupervisedProcess("plain", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log2")
    process.start()
    wait_for(lambda: psutil.Process(process.pid).children())
    (command,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    command.wait(5)


def test_exit_status_and_the_end_of_the_log_are_kept(tmp_path: Path) -> None:
    code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    process = SupervisedProcess("short", [sys.executable, "-c", code], tmp_path / "deep" / "log")
    assert process.tail() == ""
    process.start()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 3 and process.tail(2) == "98\n99"


async def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    engine = Engine(CPU, tmp_path / "log")
    engine.process.argv = [sys.executable, "-c", "raise SystemExit('no such model')"]
    engine.start()
    with pytest.raises(SlimxError, match=r"engine e ended with status 1 before it was ready; .*\nno such model"):
        await engine.wait_ready(20)
    assert engine.state is State.DEAD


async def test_waiting_for_a_server_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"waited 1 s for engine e at http://127.0.0.1:9 to become ready"):
        await control.EngineControl("http://127.0.0.1:9", "e").wait_ready(1)


# Weights ------------------------------------------------------------------------------------------------------------

HIDDEN, INNER, EXPERTS, HEAD, VOCAB = 8, 6, 3, 4, 10


class Held(nn.Module):
    """A module with one parameter and the sizes that SGLang's layers carry."""

    def __init__(self, *shape: int, weight: str = "weight", **sizes: object) -> None:
        super().__init__()
        self.register_parameter(weight, nn.Parameter(torch.randn(shape)))
        for name, value in sizes.items():
            setattr(self, name, value)


def tiny_server_model(up_first: bool = False) -> nn.Module:
    """Modules and parameters of SGLang's Qwen3-MoE with one layer, padded vocabulary, 2 heads and 1 KV head."""
    method = type("Method", (), {"load_up_proj_weight_first": up_first})()
    experts = Held(
        *(EXPERTS, 2 * INNER, HIDDEN),
        weight="w13_weight",
        **{
            "num_experts": EXPERTS,
            "hidden_size": HIDDEN,
            "intermediate_size_per_partition": INNER,
            "quant_method": method,
        },
    )
    experts.register_parameter("w2_weight", nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER)))
    attention = nn.Module()
    attention.qkv_proj = Held(
        4 * HEAD, HIDDEN, q_proj_shard_size=2 * HEAD, kv_proj_shard_size=HEAD, v_proj_shard_size=HEAD
    )
    attention.o_proj, attention.q_norm = Held(HIDDEN, 2 * HEAD), Held(HEAD)
    layer = nn.Module()
    layer.self_attn, layer.input_layernorm, layer.mlp = attention, Held(HIDDEN), nn.Module()
    layer.mlp.gate, layer.mlp.experts = Held(EXPERTS, HIDDEN), experts
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = Held(VOCAB + 6, HIDDEN, org_vocab_size=VOCAB)
    model.model.layers = nn.ModuleList([layer])
    return model


def test_the_layout_finds_every_hugging_face_tensor() -> None:
    model = tiny_server_model()
    layout = hf_layout(model)
    assert not layout.uncovered
    held = dict(model.named_parameters())
    moe, attention = "model.layers.0.mlp.experts", "model.layers.0.self_attn"
    qkv, w13 = held[f"{attention}.qkv_proj.weight"], held[f"{moe}.w13_weight"]
    for name, expected in {
        "model.embed_tokens.weight": held["model.embed_tokens.weight"][:VOCAB],
        f"{attention}.q_proj.weight": qkv[:8],
        f"{attention}.k_proj.weight": qkv[8:12],
        f"{attention}.v_proj.weight": qkv[12:],
        f"{moe}.2.gate_proj.weight": w13[2, :INNER],
        f"{moe}.2.up_proj.weight": w13[2, INNER:],
        f"{moe}.1.down_proj.weight": held[f"{moe}.w2_weight"][1],
        "model.layers.0.mlp.gate.weight": held["model.layers.0.mlp.gate.weight"],
    }.items():
        assert torch.equal(layout.places[name].view(), expected), name
    assert len(layout.places) == 1 + 3 + 2 + 1 + 1 + 3 * EXPERTS
    swapped = hf_layout(model := tiny_server_model(up_first=True)).places
    assert torch.equal(
        swapped[f"{moe}.0.up_proj.weight"].view(), dict(model.named_parameters())[f"{moe}.w13_weight"][0, :INNER]
    )


def test_a_parameter_that_no_row_explains_is_reported() -> None:
    model = tiny_server_model()
    model.model.layers[0].mlp.shared_expert = Held(3, 3)
    model.model.layers[0].mlp.experts.hidden_size = 16
    assert {name.rpartition("mlp.")[2]: why.partition(" ")[0] for name, why in hf_layout(model).uncovered.items()} == {
        "shared_expert.weight": "no",
        "experts.w13_weight": "shape",
        "experts.w2_weight": "shape",
    }


def byte_sum(tensor: torch.Tensor) -> int:
    """A checksum for tests: any function of the bytes will do."""
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1).astype(np.uint64)
    return int((raw * np.arange(1, raw.size + 1, dtype=np.uint64)).sum())


def staged(model: nn.Module, weights: dict[str, torch.Tensor], **change: object) -> dict:
    """Stage `weights` from a memory file; `change` spoils the first tensor's entry."""
    entries, raw = [], b""
    for name, tensor in weights.items():
        data = tensor.detach().contiguous().numpy().tobytes()
        entries.append({"name": name, "dtype": "float32", "shape": list(tensor.shape), "offset": len(raw)})
        entries[-1] |= {"nbytes": len(data), "checksum": f"{byte_sum(tensor):016x}"}
        raw += data
    entries[0] |= change
    fd = os.memfd_create("test")
    try:
        os.write(fd, raw)
        where = {"fd_path": f"/proc/self/fd/{fd}", "bucket": 0, "size": len(raw)}
        return sglang_receiver.stage(model, **where, tensors=entries, checksum=byte_sum)
    finally:
        os.close(fd)


def test_the_receiver_proves_copies_and_proves_again() -> None:
    model = tiny_server_model()
    places = hf_layout(model).places
    weights = {name: torch.randn(place.shape) for name, place in places.items()}
    before = {name: place.view().clone() for name, place in places.items()}

    def load_weights(named) -> None:
        for name, tensor in named:
            places[name].view().copy_(tensor)

    model.load_weights = load_weights
    for spoil, message in (
        ({"checksum": "0" * 16}, "tensor model.embed_tokens.weight of bucket 0 has checksum"),
        (
            {"name": "model.embed_token.weight"},
            "unknown to the model; the nearest that it holds is model.embed_tokens.weight",
        ),
        ({"dtype": "bfloat16"}, "is bfloat16:10,8, the model loads float32:10,8"),
        ({"offset": 1 << 20}, r"claims bytes 1048576 \+ 320 of \d+, but needs 320"),
    ):
        with pytest.raises(SlimxError, match=message):
            staged(model, weights, **spoil)
        assert sglang_receiver.status(model)["staged"] == 0
    assert staged(model, weights)["missing"] == []
    assert all(torch.equal(before[name], place.view()) for name, place in places.items())
    sglang_receiver.load_staged(model, [])
    assert sglang_receiver.status(model)["outcome"] == {"loaded": len(weights)}
    answer = sglang_receiver.verify(model, checksum=byte_sum)
    assert answer == {"checked": len(weights), "differ": [], "unverified": []}
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    places[name].view()[0, 0] += 1
    assert sglang_receiver.verify(model, checksum=byte_sum)["differ"] == [name]


def test_a_failed_copy_is_reported_and_does_not_raise() -> None:
    model = tiny_server_model()
    sglang_receiver.load_staged(model, [])
    assert "nothing is staged" in sglang_receiver.status(model)["outcome"]["error"]
    staged(model, {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    model.load_weights = lambda named: next(iter(named)) and 1 / 0
    sglang_receiver.load_staged(model, [])
    assert sglang_receiver.status(model)["outcome"]["error"] == "ZeroDivisionError: division by zero"


def test_plugin_and_client_speak_the_same_protocol() -> None:
    assert sglang_plugin.PROTOCOL == control.PROTOCOL
    module, _, function = control.RECEIVER.rpartition(".")
    assert (module, function) == (sglang_receiver.__name__, sglang_receiver.load_staged.__name__)


def test_the_plugin_leaves_other_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    sglang_plugin.register()
    assert not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu")


def test_the_cpus_hash_is_murmurhash3() -> None:
    def reference(seed: int, position: int, column: int) -> int:
        """MurmurHash3_x86_32 with seed 0 of four little-endian words."""
        state, mask = 0, 0xFFFFFFFF
        for word in (seed & mask, seed >> 32, position, column):
            word = word * 0xCC9E2D51 & mask
            word = (word << 15 | word >> 17) * 0x1B873593 & mask
            state ^= word
            state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
        state ^= 16
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ state >> shift) * factor & mask
        return state ^ state >> 16

    seeds, positions, columns = [0, 1, 2**40 + 12345], [0, 7, 2**31 + 5], [0, 1, 151935]
    got = sglang_cpu.murmur_hash32(*(torch.tensor(values) for values in (seeds, positions, columns)))
    want = [[reference(seed, position, c) for c in columns] for seed, position in zip(seeds, positions, strict=True)]
    assert got.tolist() == want and got.dtype == torch.uint32


# Client -------------------------------------------------------------------------------------------------------------


async def serve(answers: list[tuple[int, dict]]):
    """A fake server that gives `answers` in turn and then its last one for ever; returns (runner, url, bodies)."""
    bodies: list[dict] = []

    async def generate(request: aiohttp.web.Request) -> aiohttp.web.Response:
        bodies.append(await request.json())
        status, answer = answers[min(len(bodies), len(answers)) - 1]
        return aiohttp.web.json_response(answer, status=status)

    app = aiohttp.web.Application()
    app.router.add_post("/generate", generate)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}", bodies


def meta(**change: object) -> dict:
    info = {"output_token_logprobs": [[-1.5, 4, None], [-0.5, 3, None]], "finish_reason": {"type": "stop"}}
    info |= {"weight_version": "6", "cached_tokens": 0, "input_token_logprobs": []}
    return {"meta_info": info | change}


async def test_versions_fall_back_to_one_span_and_must_be_numbers() -> None:
    spans = [{"version": "5", "start": 0, "end": 1}, {"version": "6", "start": 1, "end": 2}]
    runner, url, bodies = await serve(
        [(200, meta()), (200, meta(weight_versions=spans)), (200, meta(weight_version="default"))]
    )
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            first = await client.generate([1], {"max_new_tokens": 2}, seed=9)
            assert (
                first.versions == [(0, 2, 6)] and first.token_ids.tolist() == [4, 3] and first.finish_reason == "stop"
            )
            assert (await client.generate([1], {}, seed=9)).versions == [(0, 1, 5), (1, 2, 6)]
            with pytest.raises(SlimxError, match=r"version 'default': nothing was ever published to that server"):
                await client.generate([1], {}, seed=9)
        assert bodies[0]["sampling_params"] == {"max_new_tokens": 2, "sampling_seed": 9}
    finally:
        await runner.cleanup()


async def test_lost_requests_are_sent_again_and_mistakes_are_not() -> None:
    lost = (500, {"error": {"code": "call_upstream_request_error", "message": "error sending request"}})
    runner, url, bodies = await serve([lost, (503, {}), (200, meta()), (400, {"error": {"message": "too long"}})])
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            assert (await client.generate([1], {}, seed=1)).versions and len(bodies) == 3
            with pytest.raises(SlimxError, match=re.escape(f"POST {url}/generate answered 400: too long")):
                await client.generate([1], {}, seed=1)
            assert len(bodies) == 4
    finally:
        await runner.cleanup()
    async with GenerationClient(url, ModelShape(10), retry_s=0.2) as client:
        with pytest.raises(SlimxError, match="answered 0: ClientConnectorError"):
            await client.generate([1], {}, seed=1)


SEMAPHORE = """
import multiprocessing, time
if __name__ == "__main__":
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    time.sleep(60)
"""


def test_a_killed_tree_leaves_no_semaphore_in_shared_memory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SEMAPHORE)
    before = set(os.listdir("/dev/shm"))
    process = SupervisedProcess("tree", [sys.executable, str(program)], tmp_path / "log")
    process.start()
    end = time.monotonic() + 20
    while not (made := {name for name in os.listdir("/dev/shm") if name.startswith("sem.mp-")} - before):
        assert time.monotonic() < end and process.poll() is None, process.tail()
        time.sleep(0.05)
    time.sleep(LOOK_S + 1)  # the guard looks at what the tree has mapped now and then
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    while process.poll() is None:
        assert time.monotonic() < end + 20
        time.sleep(0.05)
    assert not made & set(os.listdir("/dev/shm"))
