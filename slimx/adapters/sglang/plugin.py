"""The slimx plugin of an SGLang server: attests itself and receives weights, through the stock /weights_checker.

Written for sglang 0.5.23, entry point `sglang.srt.plugins: slimx`. /weights_checker runs `ModelRunner.check_weights` on
every rank and brings each rank's answer back; actions that begin with `slimx.` are answered here, all others by SGLang.
SGLang only logs a plugin that fails, so the client asks `slimx.attest` and refuses a server that does not answer it in
full.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import slimx
from slimx import entry_points
from slimx.adapters.device import device_named
from slimx.adapters.sglang import hooks as sglang_hooks
from slimx.adapters.sglang.weights import drafted as sglang_drafted
from slimx.adapters.sglang.weights.receiver import RankReceiver, receiver_of
from slimx.errors import SlimxError
from slimx.layout.form import server_form
from slimx.numerics.mode import server_mode
from slimx.reshard.parties import PROTOCOL

NAME, SPAWN = "slimx", "--spawn"
SCHEDULER = "sglang.srt.managers.scheduler"
CHECK_WEIGHTS = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
ANSWER, ERROR, CODE, ABOUT, PID = "slimx", "error", "code", "about", "pid"
"""Keys of the payload's `checksums`: our JSON answer, or an error's text, code and object, and whose it is."""
PREFIX = "slimx."
"""Begin of the actions that are slimx's verbs."""
VERBS = "slimx.server_verbs"
"""Entry points: verbs about a server's process, functions of the model runner and the verb's arguments."""


def register() -> None:
    """Called by SGLang early in each of its processes. Does nothing in a server that was not started for slimx."""
    if NAME not in [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    numerics, form = server_mode(sys.argv), server_form(sys.argv)
    device = device_named("cpu" if is_cpu() else "cuda")
    device.open_choices()
    numerics.open_choices()
    # A hook makes SGLang import what it wraps, 3 s of CPU time for the model runner: each process gets only what it
    # runs. SGLang calls this in the server's process before it starts others, and in a spawned child after that has
    # imported its own main module. Where the server's process forks the others, these find everything in its place.
    server = multiprocessing.parent_process() is None
    forks = server and is_cpu() and SPAWN not in sys.argv
    if server:
        HookRegistry.register(sglang_hooks.GENERATE, partial(sglang_hooks.take_fields, form), HookType.BEFORE)
        os.memfd_create(sglang_hooks.LOADS, os.MFD_CLOEXEC)  # stays open as long as this process lives
    if server or SCHEDULER in sys.modules:
        HookRegistry.register(sglang_hooks.RESOLVED, sglang_hooks.without_keys, HookType.AROUND)
        HookRegistry.register(sglang_hooks.LOADS_PATH, sglang_hooks.loads_path, HookType.REPLACE)
    if forks:
        HookRegistry.register(sglang_hooks.START_METHOD, sglang_hooks.fork_from_here, HookType.AFTER)
    if SCHEDULER in sys.modules or forks:
        HookRegistry.register(CHECK_WEIGHTS, check_weights, HookType.AROUND)
        HookRegistry.register(sglang_hooks.ADJUST, sglang_hooks.carry_seeds, HookType.AFTER)
        HookRegistry.register(sglang_hooks.PAUSED, sglang_hooks.wait_while_paused, HookType.AFTER)
        HookRegistry.register(sglang_hooks.CREATE_STORE, sglang_hooks.at_one_address, HookType.REPLACE)
        if sglang_drafted.asked(sys.argv):
            HookRegistry.register(sglang_drafted.START, sglang_drafted.take_draft, HookType.AFTER)
        form.register(HookRegistry, HookType)
        device.register(HookRegistry, HookType, experts=not numerics.replaces_layers)
        numerics.register(HookRegistry, HookType)


def check_weights(
    original: Callable[..., Any],
    runner: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: list[str] | None = None,
    *,
    role: str,
) -> Any:
    """Around `ModelRunner.check_weights`: answer actions `slimx.VERB` in the payload type of SGLang's checksum action.

    The arguments of a verb are one JSON object, the only element of `skip_tensor_list`. With TP the ranks gather their
    answers afterwards, so an error on one rank must not leave it: it travels as text under the key "error".
    """
    if not action.startswith(PREFIX):
        return original(runner, action, allow_quant_error, skip_tensor_list, role=role)
    try:
        arguments = json.loads((skip_tensor_list or ["{}"])[0])
        answer = {ANSWER: json.dumps(_answer(runner, action.removeprefix(PREFIX), arguments))}
    except SlimxError as error:
        answer = {ERROR: str(error), CODE: error.code, ABOUT: error.about}
    except Exception as error:
        answer = {ERROR: f"{action} failed with {type(error).__name__}: {error}\n{traceback.format_exc()}"}
    return {
        "checksums": answer | {PID: str(os.getpid())},
        "per_gpu_checksum": "",
        "parallelism_info": runner._weight_checker._parallelism_info(role=role).model_dump(),
    }


def _answer(runner: Any, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do a verb: a method of the model's receiver, or an entry point of `VERBS`."""
    of_process = entry_points.find(VERBS)
    verbs = {name for name in vars(RankReceiver) if not name.startswith("_")}
    if verb not in verbs:
        if verb in of_process:
            return entry_points.load(VERBS, verb)(runner, **arguments)
        raise SlimxError(
            f"unknown action {PREFIX}{verb}; this server's slimx {slimx.__version__} knows "
            f"{', '.join(sorted(verbs | of_process.keys()))}",
            code="plugin.action",
            about=PREFIX + verb,
        )
    receiver = receiver_of(runner.model)
    receiver.rank, receiver.experts = _coordinates()["rank"], _expert_location()
    return getattr(receiver, verb)(**arguments)


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
        "adapters": server_form(sys.argv).attest(runner),
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
        "cpu": device_named("cpu" if is_cpu() else "cuda").attest(),
    }
