"""The slimx plugin of an SGLang server: reports what runs in the server, and receives weights, through SGLang's
endpoint /weights_checker.

Written for sglang 0.5.23, which loads it from the entry point `slimx` of the group `sglang.srt.plugins`.
/weights_checker runs `ModelRunner.check_weights` on every rank and returns each rank's response; actions that begin
with `slimx.` are handled here, all others by SGLang. SGLang only logs the failure of a plugin, so the client calls
`slimx.attest` and refuses a server whose response is incomplete.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

import slimx
from slimx import entry_points
from slimx.adapters.device import device_named
from slimx.adapters.sglang import hooks as sglang_hooks
from slimx.adapters.sglang.weights import draft_model
from slimx.adapters.sglang.weights.layout import ExpertLocation
from slimx.adapters.sglang.weights.receiver import RankReceiver, receiver_of
from slimx.errors import SlimxError, raised
from slimx.json_types import Json
from slimx.layout.form import server_form
from slimx.numerics.mode import server_mode
from slimx.reshard.parties import PROTOCOL

NAME = "slimx"
SPAWN = "--spawn"
SCHEDULER = "sglang.srt.managers.scheduler"
CHECK_WEIGHTS = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
ANSWER = "slimx"
"""Key, in the payload's `checksums`, of the JSON response to one of slimx's actions (a verb). `ERROR`, `CODE` and
`ABOUT` are the keys of an error's text, code and subject; `PID` is the key of the process ID."""
ERROR = "error"
CODE = "code"
ABOUT = "about"
PID = "pid"
PREFIX = "slimx."
"""Prefix of /weights_checker actions that call a verb of slimx: a method of `RankReceiver` or an entry point of
`VERBS`."""
VERBS = "slimx.server_verbs"
"""Entry point group of additional verbs: functions that clients call by name on every rank. They take the model runner
and the verb's arguments, and return JSON."""

HOOKS = "slimx.server_hooks"
"""Entry point group of functions that register further hooks. They take the registry, the enumeration of hook types,
and whether the process is the server's first and whether it is or becomes a scheduler."""


class Parallelism(Protocol):
    """The part of SGLang's ParallelismInfo that the plugin uses."""

    def model_dump(self) -> Json: ...


class WeightChecker(Protocol):
    """The part of SGLang's WeightChecker that the plugin uses."""

    def _parallelism_info(self, *, role: str) -> Parallelism: ...


class Runner(Protocol):
    """The part of SGLang's ModelRunner that the plugin uses."""

    model: torch.nn.Module
    dtype: torch.dtype
    device: str
    _weight_checker: WeightChecker


def register() -> None:
    """Registers slimx's hooks; SGLang calls this early in each process of a server. Does nothing unless SGLANG_PLUGINS
    contains `slimx`, as in servers that slimx starts."""
    if NAME not in [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    numerics = server_mode(sys.argv)
    form = server_form(sys.argv)
    device = device_named("cpu" if is_cpu() else "cuda")
    device.open_choices()
    numerics.open_choices()
    # A hook makes SGLang import its target, which takes 3 s of CPU time for the model runner, so each process registers
    # only the hooks that it needs. SGLang calls `register` in the server's process before it starts others, and in a
    # spawned child after importing the child's main module. Forked processes inherit the hooks.
    server = multiprocessing.parent_process() is None
    forks = server and is_cpu() and SPAWN not in sys.argv
    scheduler = forks or SCHEDULER in sys.modules
    for add in entry_points.load_all(HOOKS).values():
        add(HookRegistry, HookType, server, scheduler)
    if server:
        HookRegistry.register(sglang_hooks.GENERATE, partial(sglang_hooks.take_fields, form), HookType.BEFORE)
        os.memfd_create(sglang_hooks.LOADS, os.MFD_CLOEXEC)  # stays open as long as this process lives
    if server or SCHEDULER in sys.modules:
        HookRegistry.register(sglang_hooks.RESOLVED, sglang_hooks.without_keys, HookType.AROUND)
        HookRegistry.register(sglang_hooks.LOADS_PATH, sglang_hooks.loads_path, HookType.REPLACE)
    if forks:
        HookRegistry.register(sglang_hooks.START_METHOD, sglang_hooks.fork_from_here, HookType.AFTER)
    if scheduler:
        HookRegistry.register(CHECK_WEIGHTS, check_weights, HookType.AROUND)
        HookRegistry.register(sglang_hooks.ADJUST, sglang_hooks.carry_seeds, HookType.AFTER)
        HookRegistry.register(sglang_hooks.PAUSED, sglang_hooks.wait_while_paused, HookType.AFTER)
        HookRegistry.register(sglang_hooks.CREATE_STORE, sglang_hooks.at_one_address, HookType.REPLACE)
        if draft_model.publishes_draft(sys.argv):
            HookRegistry.register(draft_model.START, draft_model.take_draft, HookType.AFTER)
        form.register(HookRegistry, HookType)
        device.register(HookRegistry, HookType, experts=not numerics.replaces_layers)
        numerics.register(HookRegistry, HookType)


def check_weights(
    original: Callable[..., object],
    runner: Runner,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: list[str] | None = None,
    *,
    role: str,
) -> object:
    """Wraps `ModelRunner.check_weights`: handles actions `slimx.VERB`, and passes all others to `original`. Responses
    have the payload type of SGLang's checksum action.

    The arguments of a verb are one JSON object, the only element of `skip_tensor_list`. With TP, the ranks gather their
    responses afterwards, so an exception on one rank would block the others: an error is returned as a string under the
    key "error" instead.
    """
    if not action.startswith(PREFIX):
        return original(runner, action, allow_quant_error, skip_tensor_list, role=role)
    try:
        arguments = json.loads((skip_tensor_list or ["{}"])[0])
        response = {ANSWER: json.dumps(_response(runner, action.removeprefix(PREFIX), arguments))}
    except SlimxError as error:
        response = {ERROR: str(error), CODE: error.code, ABOUT: error.about}
    except Exception as error:
        response = {ERROR: f"{action} failed with {raised(error)}\n{traceback.format_exc()}"}
    return {
        "checksums": response | {PID: str(os.getpid())},
        "per_gpu_checksum": "",
        "parallelism_info": runner._weight_checker._parallelism_info(role=role).model_dump(),
    }


def _response(runner: Runner, verb: str, arguments: Json) -> Json:
    """Calls `verb`, a public method of the model's `RankReceiver` or an entry point of `VERBS`, with `arguments`;
    returns its JSON response."""
    of_process = entry_points.find(VERBS)
    verbs = {name for name in vars(RankReceiver) if not name.startswith("_")}
    if verb not in verbs:
        if verb in of_process:
            return entry_points.load(VERBS, verb)(runner, **arguments)
        raise SlimxError(
            f"this server runs slimx {slimx.__version__}, which supports the actions "
            f"{', '.join(sorted(verbs | of_process.keys()))} but not {PREFIX}{verb}; install the same version of "
            "slimx on all machines of the run",
            code="plugin.action",
            about=PREFIX + verb,
        )
    receiver = receiver_of(runner.model)
    receiver.rank = _coordinates()["rank"]
    receiver.experts = _expert_location()
    response = getattr(receiver, verb)(**arguments)
    if verb == "commit":
        _drop_embeddings()
    return response


def _drop_embeddings() -> None:
    """Empties SGLang's cache of embeddings of images, which older weights computed."""
    from sglang.srt.managers.mm_schedule import embedding_cache

    if embedding_cache is not None:
        embedding_cache.clear()


def _expert_location() -> ExpertLocation | None:
    """Returns SGLang's map from physical expert slots to experts, or None if the model has no experts."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def _coordinates() -> dict[str, int]:
    """Returns this rank's index along each dimension of parallelism in its engine; `rank` is numbered as in
    `slimx.layout.ranks.EngineSizes`."""
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
    """Returns the parallel sizes of this rank's engine: the fields of `slimx.layout.ranks.EngineSizes`."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    location = _expert_location()
    return {
        "tensor": parallel.tp_size,
        "expert": parallel.moe_ep_size,
        "pipeline": parallel.pp_size,
        "attention_data": parallel.attn_dp_size,
        "redundant": location.num_physical_experts - location.num_logical_experts if location else 0,
    }


def _backends() -> Json:
    """Returns the kernel backends that SGLang chose based on its arguments, the model and this machine, by purpose."""
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


def attest(runner: Runner) -> Json:
    """Returns a description of this rank for the client to check: versions, position, model, kernel backends, numerics,
    and whether each hook and each patch of SGLang's CPU code is active."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import is_cpu

    hooks_in_force: dict[str, bool] = {}
    for target, hooks in HookRegistry._hooks.items():
        sources = [source for _, _, source in hooks if source is not None]
        if any(source.plugin_name == NAME for source in sources):
            hooks_in_force[target] = target in HookRegistry._patched
    numerics = server_mode(sys.argv)
    dtype = str(runner.dtype).removeprefix("torch.")
    return {
        "protocol": PROTOCOL,
        "slimx": slimx.__version__,
        "sglang": sglang.__version__,
        "pid": os.getpid(),
        "coordinates": _coordinates(),
        "sizes": _sizes(),
        "draft": draft_model.publishes_draft(sys.argv),
        "adapters": server_form(sys.argv).attest(runner),
        "fused_shared_experts": getattr(runner.model, "num_fused_shared_experts", 0),
        "model": type(runner.model).__name__,
        "epoch": receiver_of(runner.model).epoch,
        "dtype": dtype,
        "device": runner.device,
        "hooks": hooks_in_force | numerics.in_force(HookRegistry, runner.model),
        "capability": torch.cuda.get_device_capability()[0] if runner.device == "cuda" else None,
        "backends": _backends(),
        "experts": any(name.endswith("w13_weight") for name, _ in runner.model.named_parameters()),
        "fp8": any(parameter.dtype == torch.float8_e4m3fn for parameter in runner.model.parameters()),
        "numerics": numerics.contract(dtype, runner.device),
        "cpu": device_named("cpu" if is_cpu() else "cuda").attest(),
    }
