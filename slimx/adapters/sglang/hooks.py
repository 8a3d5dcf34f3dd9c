"""Small changes to a server, each a function that the plugin registers with SGLang's HookRegistry.

Written for sglang 0.5.23, sglang-router 0.3.2 and torch 2.14.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import psutil
import torch

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.form import ServedForm
from slimx.runtime.ports import meet

START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function in which SGLang chooses the start method of the server's other processes."""
LOADS_PATH = "sglang.srt.managers.load_snapshot.shm_path_for"
LOADS = "slimx-loads"
"""Name of the memory file that replaces it."""
RESOLVED = "sglang.srt.server_args.ServerArgs.resolved_dict"
KEYS = ("api_key", "admin_api_key")
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
LABEL = "slimx"
ADJUST = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"
"""Called at the end of the construction of every batch's sampling parameters; SGLang's implementation does nothing."""
UNSEEDED = 42
"""Seed of a request without one, SGLang's default in deterministic inference."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Called once in every iteration of a paused scheduler's loop, and nowhere else."""
CREATE_STORE = "torch.distributed.rendezvous._create_c10d_store"


class Seeded(Protocol):
    """SGLang's SamplingParams."""

    sampling_seed: int | None


class Req(Protocol):
    """SGLang's Req."""

    sampling_params: Seeded


class ScheduleBatch(Protocol):
    """SGLang's ScheduleBatch."""

    reqs: Sequence[Req]
    device: str


class SamplingInfo(Protocol):
    """SGLang's SamplingBatchInfo."""

    sampling_seed: torch.Tensor | None


class IdleSleeper(Protocol):
    """SGLang's IdleSleeper."""

    def maybe_sleep(self) -> None:
        """Waits up to a second for a message."""


class Scheduler(Protocol):
    """SGLang's Scheduler."""

    idle_sleeper: IdleSleeper | None


def fork_from_here(result: None, arguments: object) -> None:
    """Switches SGLang's start method from spawn to fork, after SGLang has set it.

    Each spawned process imports everything again, 5 to 9 s of CPU time. A fork is safe before CUDA or a thread pool of
    torch is started: on the CPU, before SGLang has started anything.
    """
    multiprocessing.set_start_method("fork", force=True)


def loads_path(ipc_name: str) -> str:
    """Returns the file through which the scheduler reports its load to the server, instead of
    `load_snapshot.shm_path_for`.

    SGLang's file in /dev/shm is never removed. This one is a memory file of the server's first process, found through
    /proc by that process and its children: it has no name and disappears with the server.
    """
    for process in (psutil.Process(), *psutil.Process().parents()):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            # A file may be closed after it was listed, such as that of the listing.
            with contextlib.suppress(FileNotFoundError):
                if LOADS in os.readlink(link):
                    return str(link)
    raise SlimxError(
        "the server's first process has no memory file for its load; start it with slimx.engines.server.launch",
    )


def without_keys(original: Callable[..., Json], arguments: object) -> Json:
    """Blanks the keys in `ServerArgs.resolved_dict`, which /server_info returns: clients with the generation key could
    read the control key there."""
    return {name: None if name in KEYS else value for name, value in original(arguments).items()}


def take_fields(form: ServedForm, manager: object, request: object, *args: object, **kwargs: object) -> None:
    """Sets request fields that were sent as the custom label "slimx", before `TokenizerManager.generate_request`.
    Raises SlimxError for a request that a server of this form cannot serve.

    sglang-router 0.3.2 drops fields that it does not know, `return_routed_experts` among them, but forwards custom
    labels. The label is removed because SGLang would pass it to Prometheus, which refuses unknown labels.
    """
    labels = getattr(request, "custom_labels", None) or {}
    for name, value in json.loads(labels.pop(LABEL, "{}")).items():
        setattr(request, name, value)
    form.check_request(request)


def carry_seeds(result: None, info: SamplingInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Sets the seed of each request, int64 [requests] on the batch's device, after `adjusted_from_schedule_batch`.

    SGLang passes seeds to its sampler only in deterministic inference, which also disables tuned tiles of matrix
    products, split-KV attention and the custom all-reduce. In fast mode a policy engine keeps these, and its sampler
    (the backend pytorch) uses seeds as soon as the batch has them.
    """
    if info.sampling_seed is not None:  # deterministic inference
        return
    requested = [request.sampling_params.sampling_seed for request in batch.reqs]
    seeds = torch.tensor([UNSEEDED if seed is None else seed for seed in requested], dtype=torch.int64)
    if torch.device(batch.device).type == "cuda":
        seeds = seeds.pin_memory()
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)


def wait_while_paused(result: None, scheduler: Scheduler) -> None:
    """Waits up to a second for the next message in an iteration of a paused scheduler, if the server sleeps on idle.

    SGLang waits when idle if started with `--sleep-on-idle`; while paused it still polls at full speed, during each
    publication and while trainers compute on the same devices, which need the core. Only the rank that receives
    messages has an `idle_sleeper`; the server's other ranks wait for it.
    """
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()


def at_one_address(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: object, **__: object
) -> torch.distributed.Store:
    """Creates the store of SGLang's first process group at the address of `hostname` only, instead of torch's
    `_create_c10d_store`, which listens on every interface. The store contains the groups' addresses: a process that can
    write to it chooses the ranks' peers, and gloo messages are unpickled."""
    return meet(hostname, port, rank=rank, size=world_size, timeout=timeout)
