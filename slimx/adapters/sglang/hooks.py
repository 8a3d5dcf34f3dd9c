"""Small changes to an SGLang server. Each is a function that `plugin.register` registers with SGLang's HookRegistry.

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

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.form import ServedForm
from slimx.runtime.ports import meet

START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""Dotted name of the SGLang function that sets the multiprocessing start method of the server's other processes."""
LOADS_PATH = "sglang.srt.managers.load_snapshot.shm_path_for"
LOADS = "slimx-loads"
"""Name of the memory file (memfd) that replaces SGLang's file of scheduler loads in /dev/shm."""
RESOLVED = "sglang.srt.server_args.ServerArgs.resolved_dict"
KEYS = ("api_key", "admin_api_key")
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
LABEL = "slimx"
FIELDS = "slimx.request_fields"
"""Entry point group of functions (request, value) that set a field of a request in another form than clients send."""
ADJUST = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"
"""Dotted name of the SGLang method that is called after the sampling parameters of a batch have been built; without a
hook, the method does nothing."""
UNSEEDED = 42
"""Seed for requests that set none: SGLang's default in deterministic inference."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Dotted name of the SGLang method that is called once per iteration of a paused scheduler's loop, and nowhere else."""
CREATE_STORE = "torch.distributed.rendezvous._create_c10d_store"


class Seeded(Protocol):
    """The field of SGLang's SamplingParams that hooks read."""

    sampling_seed: int | None


class Req(Protocol):
    """The part of SGLang's Req that hooks read."""

    sampling_params: Seeded


class ScheduleBatch(Protocol):
    """The part of SGLang's ScheduleBatch that hooks read."""

    reqs: Sequence[Req]
    device: str


class SamplingInfo(Protocol):
    """The part of SGLang's SamplingBatchInfo that hooks set."""

    sampling_seed: torch.Tensor | None


class IdleSleeper(Protocol):
    """The part of SGLang's IdleSleeper that hooks use."""

    def maybe_sleep(self) -> None:
        """Waits up to a second for a message to the scheduler."""


class Scheduler(Protocol):
    """The part of SGLang's Scheduler that hooks use."""

    idle_sleeper: IdleSleeper | None


def fork_from_here(result: None, arguments: object) -> None:
    """Switches SGLang's start method from spawn to fork, after SGLang has set it.

    Each spawned process imports everything again, which takes 5 to 9 s of CPU time. A fork is safe only while neither
    CUDA nor a torch thread pool has been initialized. On the CPU, this is true until SGLang starts its first process.
    """
    multiprocessing.set_start_method("fork", force=True)


def loads_path(ipc_name: str) -> str:
    """Replaces `load_snapshot.shm_path_for`: returns the path of the file through which the scheduler reports its load
    to the server. `ipc_name` is ignored.

    SGLang's file in /dev/shm is never removed. The file at the returned path is a memory file of the server's first
    process, which that process and its children find through /proc. It has no entry in a file system and disappears
    with the server.
    """
    for process in (psutil.Process(), *psutil.Process().parents()):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            # A descriptor may have been closed since it was listed, as that of the listing itself always is.
            with contextlib.suppress(FileNotFoundError):
                if LOADS in os.readlink(link):
                    return str(link)
    raise SlimxError(
        "neither this process nor its parents have a memory file for scheduler loads; start the server with "
        "`python -m slimx.engines.server.launch`",
    )


def without_keys(original: Callable[..., Json], arguments: object) -> Json:
    """Returns the result of `ServerArgs.resolved_dict` with both API keys set to None. /server_info returns this
    dictionary; without the hook, a client that has only the generation key (`api_key`) could read the control key
    (`admin_api_key`)."""
    return {name: None if name in KEYS else value for name, value in original(arguments).items()}


def take_fields(form: ServedForm, manager: object, request: object, *args: object, **kwargs: object) -> None:
    """Sets the fields of `request` that its client sent as JSON in the custom label "slimx"; runs before
    `TokenizerManager.generate_request`. `form`: describes the server's weights, for example LoRA adapters on shared
    base weights. Raises ValueError if a server with such weights cannot answer the request.

    sglang-router 0.3.2 drops request fields that it does not define, among them `return_routed_experts`, but forwards
    custom labels. The label is removed from the request because SGLang would pass it to Prometheus, which refuses
    unknown labels.
    """
    labels = getattr(request, "custom_labels", None) or {}
    others = entry_points.load_all(FIELDS)
    for name, value in json.loads(labels.pop(LABEL, "{}")).items():
        if name in others:
            others[name](request, value)
        else:
            setattr(request, name, value)
    form.check_request(request)


def carry_seeds(result: None, info: SamplingInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Sets `info.sampling_seed` to the requests' seeds, int64 [requests] on the batch's device; runs after
    `adjusted_from_schedule_batch`.

    SGLang passes seeds to its sampler only in deterministic inference, which also disables tuned tile sizes of matrix
    multiplications, split-KV attention and the custom all-reduce. In slimx's fast mode a policy engine keeps these
    optimizations, and its sampler (backend pytorch) uses seeds whenever the batch has them.
    """
    if info.sampling_seed is not None:  # deterministic inference
        return
    requested = [request.sampling_params.sampling_seed for request in batch.reqs]
    seeds = torch.tensor([UNSEEDED if seed is None else seed for seed in requested], dtype=torch.int64)
    if torch.device(batch.device).type == "cuda":
        seeds = seeds.pin_memory()
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)


def wait_while_paused(result: None, scheduler: Scheduler) -> None:
    """Waits up to a second for the next message in each iteration of a paused scheduler's loop, if the server was
    started with `--sleep-on-idle`.

    With that option SGLang itself waits only when idle. Without this hook, a paused scheduler would poll at full speed
    during each publication, and would occupy a CPU core that trainers on the same devices need. Only the rank that
    receives messages has an `idle_sleeper`; the server's other ranks wait for that rank.
    """
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()


def at_one_address(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: object, **__: object
) -> torch.distributed.Store:
    """Replaces torch's `_create_c10d_store`: creates the store of SGLang's first process group, which listens only on
    the address of `hostname` instead of on every interface. The store contains the addresses of process groups. Any
    process that can write to it could therefore choose the ranks' peers, whose gloo messages are unpickled."""
    return meet(hostname, port, rank=rank, size=world_size, timeout=timeout)
