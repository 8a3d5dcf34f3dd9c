"""Small changes to a server, each a function that the plugin registers with SGLang's HookRegistry.

Written for sglang 0.5.23, sglang-router 0.3.2 and torch 2.14.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from slimx.errors import SlimxError
from slimx.layout.form import ServedForm
from slimx.runtime.ports import meet

START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function in which SGLang chooses how the server starts its other processes."""
LOADS_PATH = "sglang.srt.managers.load_snapshot.shm_path_for"
LOADS = "slimx-loads"
"""Name of the memory file that replaces it."""
RESOLVED = "sglang.srt.server_args.ServerArgs.resolved_dict"
KEYS = ("api_key", "admin_api_key")
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
LABEL = "slimx"
ADJUST = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"
"""Called at the end of the construction of every batch's sampling parameters; SGLang's own does nothing."""
UNSEEDED = 42
"""Seed of a request that names none, SGLang's own in deterministic inference."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Called once in every turn of a paused scheduler's loop, and in no other."""
CREATE_STORE = "torch.distributed.rendezvous._create_c10d_store"


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
    )


def without_keys(original: Callable[..., dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Wraps `ServerArgs.resolved_dict`, which /server_info answers with, and blanks the keys: who may generate would
    read there the key of those who may replace the weights."""
    return {name: None if name in KEYS else value for name, value in original(arguments).items()}


def take_fields(form: ServedForm, manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before `TokenizerManager.generate_request`: set request fields that travelled as the custom label "slimx", and
    refuse a request that a server of this form cannot answer.

    sglang-router 0.3.2 drops fields that it does not know, `return_routed_experts` among them, but carries custom
    labels. The label is taken away because SGLang would hand it to Prometheus, which refuses labels that it does not
    know.
    """
    labels = getattr(request, "custom_labels", None) or {}
    for name, value in json.loads(labels.pop(LABEL, "{}")).items():
        setattr(request, name, value)
    form.check_request(request)


def carry_seeds(result: None, info: Any, batch: Any, vocab_size: int) -> None:
    """After `adjusted_from_schedule_batch`: the seed of each request, int64 [requests] on the batch's device.

    SGLang hands seeds to its sampler in deterministic inference only, which is more than seeds: matrix products without
    tuned tiles, attention without split keys, no custom all-reduce. In fast mode a policy engine has none of that, and
    its sampler (the backend pytorch) takes seeds all the same once the batch carries them.
    """
    if info.sampling_seed is not None:  # deterministic inference
        return
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    seeds = torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)
    if torch.device(batch.device).type == "cuda":
        seeds = seeds.pin_memory()
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)


def wait_while_paused(result: None, scheduler: Any) -> None:
    """After a turn of a paused scheduler: wait up to a second for the next message, if the server sleeps on idle.

    SGLang waits where it is idle and was started with `--sleep-on-idle`; while it is paused it polls at full speed all
    the same, through each publication and for as long as trainers compute on the same devices, which need the core.
    Only the rank that messages come to has an `idle_sleeper`; the others of its server wait for that one.
    """
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()


def at_one_address(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: Any, **__: Any) -> Any:
    """Replaces torch's `_create_c10d_store`, which would listen on every interface: the store of SGLang's first process
    group listens at the address of `hostname` alone. It keeps the groups' addresses: who can write to it decides whom
    the ranks hear, and what gloo brings is unpickled."""
    return meet(hostname, port, rank=rank, size=world_size, timeout=timeout)
