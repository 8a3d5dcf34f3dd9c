"""The slimx plugin of an SGLang server: attests itself and receives weights, through the stock /weights_checker.

Written for sglang 0.5.23, entry point `sglang.srt.plugins: slimx`. /weights_checker runs `ModelRunner.check_weights` on
every rank and brings each rank's answer back; actions that begin with `slimx.` are answered here, all others by SGLang.
SGLang only logs a plugin that fails, so the client asks `slimx.attest` and refuses a server that does not answer it in
full.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

import slimx
from slimx.adapters.sglang import cpu as sglang_cpu
from slimx.adapters.sglang import draws as sglang_draws
from slimx.adapters.sglang import lora as sglang_lora
from slimx.adapters.sglang import meeting as sglang_meeting
from slimx.adapters.sglang import paused as sglang_paused
from slimx.adapters.sglang import seeds as sglang_seeds
from slimx.adapters.sglang import trace as sglang_trace
from slimx.adapters.sglang.weights import drafted as sglang_drafted
from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.errors import SlimxError
from slimx.numerics.mode import server_mode

PROTOCOL = 8
"""Version of the actions and their JSON; the client (slimx.engines.server.control) must speak the same."""
NAME, SPAWN = "slimx", "--spawn"
SCHEDULER = "sglang.srt.managers.scheduler"
RESOLVED = "sglang.srt.server_args.ServerArgs.resolved_dict"
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function in which SGLang chooses how the server starts its other processes."""
LOADS_PATH = "sglang.srt.managers.load_snapshot.shm_path_for"
LOADS = "slimx-loads"
"""Name of the memory file that replaces it."""
CHECK_WEIGHTS = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
ANSWER, ERROR, CODE, ABOUT, PID = "slimx", "error", "code", "about", "pid"
"""Keys of the payload's `checksums`: our JSON answer, or an error's text, code and object, and whose it is."""
KEYS = ("api_key", "admin_api_key")
EVERY_RANK = "all"
"""In place of a rank's number: a bucket of which every rank takes what it holds."""


def register() -> None:
    """Called by SGLang early in each of its processes. Does nothing in a server that was not started for slimx."""
    if NAME not in [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    numerics, policies = server_mode(sys.argv), sglang_lora.asked(sys.argv)
    if is_cpu():
        sglang_cpu.open_choices()
    numerics.open_choices()
    # A hook makes SGLang import what it wraps, 3 s of CPU time for the model runner: each process gets only what it
    # runs. SGLang calls this in the server's process before it starts others, and in a spawned child after that has
    # imported its own main module. Where the server's process forks the others, these find everything in its place.
    server = multiprocessing.parent_process() is None
    forks = server and is_cpu() and SPAWN not in sys.argv
    if server:
        HookRegistry.register(GENERATE, partial(take_fields, policies), HookType.BEFORE)
        os.memfd_create(LOADS, os.MFD_CLOEXEC)  # stays open as long as this process lives
    if server or SCHEDULER in sys.modules:
        HookRegistry.register(RESOLVED, without_keys, HookType.AROUND)
        HookRegistry.register(LOADS_PATH, loads_path, HookType.REPLACE)
    if forks:
        HookRegistry.register(START_METHOD, fork_from_here, HookType.AFTER)
    if SCHEDULER in sys.modules or forks:
        HookRegistry.register(CHECK_WEIGHTS, check_weights, HookType.AROUND)
        HookRegistry.register(sglang_seeds.ADJUST, sglang_seeds.carry, HookType.AFTER)
        HookRegistry.register(sglang_paused.TURN, sglang_paused.wait, HookType.AFTER)
        HookRegistry.register(sglang_meeting.CREATE, sglang_meeting.at_one_address, HookType.REPLACE)
        if sglang_drafted.asked(sys.argv):
            HookRegistry.register(sglang_drafted.START, sglang_drafted.take_draft, HookType.AFTER)
        if policies is not None:
            sglang_lora.register(HookRegistry, HookType, policies)
        if not is_cpu():  # which computes fp64 as fast as the estimate that saves it
            HookRegistry.register(sglang_draws.DRAW, sglang_draws.draw, HookType.REPLACE)
        else:
            sglang_cpu.register_hooks(HookRegistry, HookType, experts=not numerics.replaces_layers)
            sglang_cpu.close_gaps()
        numerics.register(HookRegistry, HookType)


def fork_from_here(result: None, arguments: Any) -> None:
    """After SGLang has chosen to spawn its other processes: fork them instead.

    Each spawned process imports everything again, 5 to 9 s of CPU time. A fork is safe where neither CUDA nor a thread
    pool of torch's has begun: on the CPU, before SGLang has started anything.
    """
    multiprocessing.set_start_method("fork", force=True)


def loads_path(ipc_name: str) -> str:
    """The file in which the scheduler tells its load to the server, in place of `load_snapshot.shm_path_for`.

    SGLang's file in /dev/shm is never removed. This one is a memory file of the server's first process, found through
    /proc by that process and its children: it has no name to leave behind, however the server ends.
    """
    for process in (psutil.Process(), *psutil.Process().parents()):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            # A file may be closed between the listing and the look, the listing's own among them.
            with contextlib.suppress(FileNotFoundError):
                if LOADS in os.readlink(link):
                    return str(link)
    raise SlimxError(
        "the server's first process holds no memory file for its load; start it with slimx.engines.server.launch",
        code="plugin.loads",
        about=LOADS,
    )


def without_keys(original: Callable[..., dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Wraps `ServerArgs.resolved_dict`, which /server_info answers with, and blanks the keys: who may generate would
    read there the key of those who may replace the weights."""
    return {name: None if name in KEYS else value for name, value in original(arguments).items()}


def take_fields(policies: Mapping[str, float] | None, manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before `TokenizerManager.generate_request`: set request fields that travelled as the custom label "slimx", and
    refuse a request that the server's `policies` (`sglang_lora.asked`) have no adapters for.

    sglang-router 0.3.2 drops fields that it does not know, `return_routed_experts` among them, but carries custom
    labels. The label is taken away because SGLang would hand it to Prometheus, which refuses labels that it does not
    know.
    """
    labels = getattr(request, "custom_labels", None) or {}
    for name, value in json.loads(labels.pop(NAME, "{}")).items():
        setattr(request, name, value)
    if policies is not None:
        sglang_lora.check_named(policies, request)


def check_weights(
    original: Callable[..., Any],
    runner: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: list[str] | None = None,
    *,
    role: str,
) -> Any:
    """Around `ModelRunner.check_weights`: answer `slimx.*` actions in the payload type of SGLang's checksum action.

    The argument of an action is one JSON object, the only element of `skip_tensor_list`. With TP the ranks gather their
    answers afterwards, so an error on one rank must not leave it: it travels as text under the key "error".
    """
    if not action.startswith("slimx."):
        return original(runner, action, allow_quant_error, skip_tensor_list, role=role)
    try:
        answer = {ANSWER: json.dumps(_answer(runner, action, json.loads((skip_tensor_list or ["{}"])[0])))}
    except SlimxError as error:
        answer = {ERROR: str(error), CODE: error.code, ABOUT: error.about}
    except Exception as error:
        answer = {ERROR: f"{action} failed with {type(error).__name__}: {error}\n{traceback.format_exc()}"}
    return {
        "checksums": answer | {PID: str(os.getpid())},
        "per_gpu_checksum": "",
        "parallelism_info": runner._weight_checker._parallelism_info(role=role).model_dump(),
    }


def _answer(runner: Any, action: str, argument: dict[str, Any]) -> dict[str, Any]:
    receiver = receiver_of(runner.model)
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "slimx.attest": lambda: attest(runner),
        "slimx.inventory": lambda: receiver.inventory(**argument, experts=_expert_location()),
        "slimx.begin": lambda: receiver.begin(**argument, experts=_expert_location()),
        "slimx.stage": lambda: receiver.stage(**_own_part(argument, _coordinates()["rank"])),
        "slimx.verify": receiver.verify,
        "slimx.commit": lambda: receiver.commit(**argument),
        "slimx.abort": receiver.abort,
        "slimx.status": receiver.status,
        "slimx.trace": lambda: _trace(runner, **argument),
    }
    if action not in actions:
        raise SlimxError(
            f"unknown action {action}; this server's slimx {slimx.__version__} knows {', '.join(sorted(actions))}",
            code="plugin.action",
            about=action,
        )
    return actions[action]()


def _trace(runner: Any, on: bool) -> dict[str, Any]:
    """Begin to note what goes through the model, or end it: {point: digests of rows}."""
    if on:
        runner.slimx_trace = sglang_trace.Trace(runner.model)
        return {}
    trace = runner.__dict__.pop("slimx_trace", None)
    if trace is None:
        raise SlimxError("no trace was begun in this process", code="plugin.trace", about="trace")
    return trace.end()


def _own_part(argument: dict[str, Any], rank: int) -> dict[str, Any]:
    """The arguments of `RankReceiver.stage` from those of the action: {policy, version, epoch, bucket, ranks: {number
    or "all": {fd_path, size, tensors}}}."""
    ranks = argument.pop("ranks")
    part = ranks.get(str(rank), ranks.get(EVERY_RANK))
    if part is None:
        raise SlimxError(
            f"bucket {argument['bucket']} brings nothing for rank {rank}, only for {', '.join(ranks)}",
            code="plugin.bucket",
            about=f"bucket {argument['bucket']}",
        )
    return argument | part


def _expert_location() -> Any:
    """The experts that the slots of this process hold (None for models without experts)."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def _coordinates() -> dict[str, int]:
    """The coordinates of this rank in its engine; `rank` counts as `slimx.layout.ranks.EngineSizes` does."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {
        "rank": parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
        "tensor": parallel.tp_rank,
        "expert": parallel.moe_ep_rank,
        "pipeline": parallel.pp_rank,
        "attention_data": parallel.attn_dp_rank,
    }


def _sizes() -> dict[str, int]:
    """The sizes by which this engine splits its model: the fields of `slimx.layout.ranks.EngineSizes`."""
    from sglang.srt.runtime_context import get_parallel

    parallel, location = get_parallel(), _expert_location()
    return {
        "tensor": parallel.tp_size,
        "expert": parallel.moe_ep_size,
        "pipeline": parallel.pp_size,
        "attention_data": parallel.attn_dp_size,
        "redundant": location.num_physical_experts - location.num_logical_experts if location else 0,
    }


def _backends() -> dict[str, Any]:
    """Kernels as SGLang resolved them from its arguments, the model and this machine."""
    from sglang.srt.runtime_context import attention_backends, get_exec

    execution = get_exec()
    prefill, decode = attention_backends()
    return {
        "prefill_attention": prefill,
        "decode_attention": decode,
        "moe_runner_backend": execution.moe.moe_runner_backend,
        "moe_a2a_backend": execution.moe.moe_a2a_backend,
        "fp8_gemm_runner_backend": execution.kernel.fp8_gemm_runner_backend,
        "sampling_backend": execution.kernel.sampling_backend,
        "custom_all_reduce": not execution.comm.disable_custom_all_reduce,
        "deterministic": execution.deterministic.enable_deterministic_inference,
    }


def attest(runner: Any) -> dict[str, Any]:
    """The facts of this rank: versions, model, and whether each hook and each CPU entry is in force."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import is_cpu

    ours = {
        target: target in HookRegistry._patched
        for target, hooks in HookRegistry._hooks.items()
        if any(source is not None and source.plugin_name == NAME for _, _, source in hooks)
    }
    numerics, dtype = server_mode(sys.argv), str(runner.dtype).removeprefix("torch.")
    return {
        "protocol": PROTOCOL,
        "slimx": slimx.__version__,
        "sglang": sglang.__version__,
        "pid": os.getpid(),
        "coordinates": _coordinates(),
        "sizes": _sizes(),
        "draft": sglang_drafted.asked(sys.argv),
        "adapters": sglang_lora.attest(runner.lora_manager),
        "fused_shared_experts": getattr(runner.model, "num_fused_shared_experts", 0),
        "model": type(runner.model).__name__,
        "epoch": receiver_of(runner.model).epoch,
        "dtype": dtype,
        "device": runner.device,
        "hooks": ours | numerics.in_force(HookRegistry, runner.model),
        "capability": torch.cuda.get_device_capability()[0] if runner.device == "cuda" else None,
        "backends": _backends(),
        "experts": any(name.endswith("w13_weight") for name, _ in runner.model.named_parameters()),
        "fp8": any(held.dtype == torch.float8_e4m3fn for held in runner.model.parameters()),
        "numerics": numerics.contract(dtype, runner.device),
        "cpu": sglang_cpu.attest() if is_cpu() else None,
    }
