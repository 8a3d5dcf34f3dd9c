"""One engine: a supervised SGLang server with a state, so that it never serves weights that were not verified.

    STARTING --ready, attested--> READY <--resume/pause--> PAUSED --load--> DIRTY --verified--> PAUSED
                                                             |  ^             ^
                                                        sleep|  |wake         |wake of weights (their values are gone)
                                                             v  |             |
                                                            ASLEEP -----------+            any --ended, failed--> DEAD

No Ray in here: the actor that owns an Engine lives in orchestration.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import psutil

from slimx.errors import SlimxError
from slimx.layout.ranks import EngineSizes
from slimx.reshard.packed import PackedTensor
from slimx.rollout.arguments import check_server_args, command_line
from slimx.rollout.control import RECEIVER, EngineControl, Json, PauseMode, Tag
from slimx.rollout.process import SupervisedProcess

__all__ = [
    "Engine",
    "EngineControl",
    "EngineSpec",
    "State",
    "check_server_args",
    "server_argv",
    "server_env",
]


class State(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    PAUSED = "PAUSED"
    DIRTY = "DIRTY"
    """A copy has begun and no verification has passed since: serves only after one."""
    ASLEEP = "ASLEEP"
    DEAD = "DEAD"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.DEAD}),
    State.READY: frozenset({State.PAUSED, State.DEAD}),
    State.PAUSED: frozenset({State.READY, State.DIRTY, State.ASLEEP, State.DEAD}),
    State.DIRTY: frozenset({State.DIRTY, State.PAUSED, State.DEAD}),
    State.ASLEEP: frozenset({State.PAUSED, State.DIRTY, State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one server is made of."""

    name: str
    model_path: str
    """Hugging Face directory."""
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    port: int
    host: str = "127.0.0.1"
    threads: int = 1
    """CPU threads of the server (CPU only)."""
    max_total_tokens: int | None = None
    """KV-cache room in tokens; None: SGLang decides."""
    sizes: EngineSizes = EngineSizes()
    """How the server splits the model over its ranks."""
    seed: int = 1
    routed_experts: bool = True
    """Whether the server can return each token's experts (MoE models)."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """More fields of SGLang's ServerArgs."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def server_args(spec: EngineSpec) -> dict[str, Any]:
    """SGLang's arguments for `spec`: ours, the user's, and defaults that the user may replace."""
    ours: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "device": spec.device,
        "host": spec.host,
        "port": spec.port,
        "random_seed": spec.seed,
        "max_total_tokens": spec.max_total_tokens,
        "tp_size": spec.sizes.tensor,
        "ep_size": spec.sizes.expert,
        "pp_size": spec.sizes.pipeline,
        "custom_weight_loader": [RECEIVER],
        "enable_return_routed_experts": spec.routed_experts,
        # Seeded sampling per request, and log-probs that are log_softmax(logits / temperature).
        "enable_deterministic_inference": True,
    }
    if spec.sizes.attention_data > 1:
        ours |= {"enable_dp_attention": True, "dp_size": spec.sizes.attention_data}
    defaults: dict[str, Any] = {"log_level": "warning"}
    if spec.device == "cpu":
        ours |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
        # An idle server would otherwise poll at full speed on a core that the trainer needs.
        defaults["sleep_on_idle"] = True
    check_server_args(spec.sglang)
    if taken := sorted(ours.keys() & spec.sglang.keys()):
        raise SlimxError(
            f"rollout.engines.sglang.{taken[0]} is set by slimx ({ours[taken[0]]!r}) for engine {spec.name}; "
            "leave it out"
        )
    return defaults | spec.sglang | ours


def server_argv(spec: EngineSpec) -> list[str]:
    """The command that runs the server in this environment's Python."""
    return [sys.executable, "-m", "slimx.rollout.server", "--", *command_line(server_args(spec))]


def server_env(spec: EngineSpec) -> dict[str, str]:
    """Variables of the server process besides what it inherits. Models are directories: nothing is asked of the hub."""
    return {"HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": str(spec.threads)} if spec.device == "cpu" else {})


class Engine:
    """A server process, its control client and its state. One owner calls it, one call at a time."""

    def __init__(self, spec: EngineSpec, log_path: Path | str) -> None:
        self.spec = spec
        self.process = SupervisedProcess(f"engine {spec.name}", server_argv(spec), log_path, server_env(spec))
        self.control = EngineControl(spec.url, spec.name)
        self.state = State.DEAD
        self.asleep: set[Tag] = set()
        """Tags whose memory is released."""
        self.attestation: list[Json] = []
        self.pause_mode: PauseMode = "retract"
        self.version: int | None = None
        """Version of the verified weights; None before the first publication."""

    def move(self, to: State) -> None:
        """Change the state, or refuse a change that the table does not allow."""
        if to not in TRANSITIONS[self.state]:
            allowed = ", ".join(sorted(TRANSITIONS[self.state]))
            raise SlimxError(
                f"engine {self.spec.name} is {self.state} and cannot become {to}; from here it can become {allowed}"
            )
        self.state = to

    def require(self, what: str, *states: State) -> None:
        """Refuse `what` unless the engine is in one of `states`."""
        if self.state not in states:
            raise SlimxError(f"engine {self.spec.name} is {self.state}; {what} needs {' or '.join(states)}")

    # Life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server process; `wait_ready` next."""
        self.move(State.STARTING)
        self.asleep.clear()
        self.version = None
        self.process.start()

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server generates and attests the plugin. On any failure it is stopped and DEAD."""
        self.require("wait_ready", State.STARTING)
        try:
            await self.control.wait_ready(deadline_s, self.process)
            self.attestation = await self.control.attest()
            self._check_own()
            if (dtype := self.attestation[0]["dtype"]) != self.spec.dtype:
                raise SlimxError(
                    f"engine {self.spec.name} computes in {dtype}, the configuration asks for {self.spec.dtype}"
                )
        except BaseException:
            await self.stop()
            raise
        self.move(State.READY)

    def _check_own(self) -> None:
        """Refuse the answer of somebody else's server, which may have taken the port before ours could listen on it."""
        family = {process.pid for process in psutil.Process(self.process.pid).children(recursive=True)}
        for rank in self.attestation:
            if rank["pid"] not in family:
                raise SlimxError(
                    f"engine {self.spec.name}: process {rank['pid']} answers at {self.spec.url}, which is not the one "
                    f"that was started; another server has the port: start again (log {self.process.log_path})"
                )

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server with its whole process tree; DEAD afterwards. May be called in any state."""
        self.state = State.DEAD
        await asyncio.to_thread(self.process.stop, grace_s)

    async def check_health(self, deadline_s: float) -> None:
        """Raise if the process ended or, while READY, does not generate. The state stays: the owner counts failures.

        A paused or sleeping server cannot answer /health_generate (and would call itself unhealthy), so only its
        process is looked at.
        """
        if (status := self.process.poll()) is not None:
            raise SlimxError(
                f"engine {self.spec.name} ended with status {status}; the end of {self.process.log_path}:\n"
                f"{self.process.tail(20)}"
            )
        if self.state is State.READY:
            await self.control.health(deadline_s)

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        self.require("pause", State.READY)
        await self.control.pause(mode)
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        self.require("resume", State.PAUSED)
        if self.asleep:
            raise SlimxError(
                f"engine {self.spec.name} cannot resume while {', '.join(sorted(self.asleep))} is released; "
                "wake it first"
            )
        await self.control.resume()
        self.move(State.READY)

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights")) -> None:
        """Release the memory of `tags`."""
        self.require("sleep", State.PAUSED)
        await self.control.sleep(tags)
        self.asleep |= set(tags)
        self.move(State.ASLEEP)

    async def wake(self, tags: tuple[Tag, ...] | None = None) -> None:
        """Take memory back, all or `tags`. With weights back the engine is DIRTY until a publication is verified."""
        wanted = tuple(sorted(self.asleep if tags is None else self.asleep & set(tags)))
        if not wanted:
            raise SlimxError(
                f"engine {self.spec.name}: nothing of {tags or 'it'} is asleep ({sorted(self.asleep) or 'all awake'})"
            )
        await self.control.wake(wanted)
        self.asleep -= set(wanted)
        if "weights" in wanted:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    # Publication ----------------------------------------------------------------------------------------------------

    async def stage(
        self, fd_path: str, tensors: list[PackedTensor], bucket: int, size: int, deadline_s: float | None = None
    ) -> Json:
        """Bring one bucket into the server and prove its bytes. Allowed while it serves: the model is not touched."""
        self.require("stage", State.READY, State.PAUSED, State.DIRTY)
        return await self.control.stage(fd_path, tensors, bucket, size, deadline_s)

    async def abort(self) -> None:
        """Give a publication up. Before the first copy nothing has changed; a DIRTY engine stays DIRTY."""
        await self.control.abort_staging()

    async def load(self, deadline_s: float | None = None) -> int:
        """Copy all staged tensors in place; the whole model must be staged. DIRTY from before the first copy."""
        self.require("load", State.PAUSED, State.DIRTY)
        await self.control.check_staged()
        self.move(State.DIRTY)
        self.version = None
        return await self.control.load(deadline_s)

    async def verify(self, checksums: dict[str, int] | None = None, deadline_s: float | None = None) -> Json:
        """Prove that the model holds `checksums` (default: what was loaded), all of it. DIRTY becomes PAUSED."""
        self.require("verify", State.READY, State.PAUSED, State.DIRTY)
        answer = await self.control.verify(checksums, deadline_s)
        if wrong := answer["differ"] or answer["unverified"]:
            how = "differ from the published ones" if answer["differ"] else "were never published"
            raise SlimxError(
                f"engine {self.spec.name}: {len(wrong)} tensors {how}, first {wrong[0]}; "
                "publish again or restart the engine"
            )
        if self.state is State.DIRTY:
            self.move(State.PAUSED)
        return answer

    async def commit(self, version: int) -> None:
        """Forget KV of older weights and stamp the verified weights with `version`; `resume` next.

        Paused `in_place`, running requests keep their KV (and SGLang would refuse to flush): the caller chose to mix
        versions.
        """
        self.require("commit", State.PAUSED)
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.control.flush_cache()
        await self.control.set_version(version)
        self.version = version
