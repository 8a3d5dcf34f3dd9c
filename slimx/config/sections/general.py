"""Sections `run`, `model`, `numerics`, `cluster`, `track`, `checkpoint` and `schedule`: identity of a run, its model,
its machines, the records that it keeps, and its steps."""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from slimx.config.section import Amount, Count, Faults, PathText, Positive, Seconds, Section, Size
from slimx.errors import counted
from slimx.runtime.ports import LOOPBACK


class RunSection(Section):
    name: str = "run"
    """Name of the run in experiment trackers and in the report."""
    dir: PathText
    """Directory to which the run writes all its files."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Random seed for prompt order, sampling and weight initialization."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Use of an existing checkpoint. auto: continue from the newest complete checkpoint in `run.dir`, if there is one;
    never: refuse a `run.dir` that already contains a run; must: refuse to start without a complete checkpoint."""
    fork: PathText | None = None
    """Checkpoint of another run (RUN/checkpoints/iter_NNNNNNN) from which this run starts, including its optimizer
    state and waiting groups; null: none. Ignored once run.dir contains a checkpoint."""
    fork_prompts: Literal["continue", "anew"] = "continue"
    """Prompts of a forked run. continue: the prompts of the other run, from its position; anew: this run's prompts from
    the beginning, without the groups that were waiting, which suits the stages of a curriculum."""


class Model(Section):
    path: PathText
    """Hugging Face directory of the model, with config.json, tokenizer and safetensors files."""
    family: str | None = None
    """Dotted path of a module that builds the model, for an architecture that slimx does not support (docs/models.md);
    null: the built-in module for the architecture that config.json names."""


class Numerics(Section):
    mode: Literal["fast", "exact"] = "fast"
    """Numerical agreement of trainer and engines. fast: stock kernels in both, and the gap between their log-probs is
    measured; exact: the same operations in the same order in both, which makes log-probs bitwise equal
    (docs/numerics.md lists what is covered)."""
    leaves: Size | None = None
    """Exact mode: number of partial sums, a power of two, that trainer and engines add to compute the output of a
    row-parallel layer. Every tensor parallel size of trainer and engines must divide it. null: the largest of these
    sizes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of parameters and activations."""
    router_dtype: Literal["float32"] = "float32"
    """Data type of the router's logits and softmax."""

    @property
    def exact(self) -> bool:
        """True if trainer and engines compute bitwise equal values (`mode: exact`)."""
        return self.mode == "exact"


class Cluster(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for trainers and engines. auto: cuda if torch finds a GPU, otherwise cpu."""
    ray_address: str | None = None
    """Address of a running Ray cluster; null: slimx starts a local cluster."""
    trusted_network: bool | str | None = None
    """Network that only this run's users can reach. A CIDR: servers take their addresses from this network; true: they
    take the addresses that Ray has for their machines; null: there is none. Required by engines with `dp_attention` on
    several `nodes` (docs/engines.md)."""
    start_deadline: Seconds | None = None
    """Seconds within which Ray, trainers and engines must have started. null: 300 on CPUs; on GPUs, 600 for compilation
    plus one second per GB of weights that a node reads."""
    ray_deadline: Seconds = 45
    """Seconds within which Ray's processes must respond. After that the run ends with an error that names the silent
    process."""
    stop_deadline: Seconds = 120
    """Maximum number of seconds between a signal or failure and the exit of the process, which then exits even if its
    shutdown has not finished."""
    cpu_affinity: Literal["auto", "none"] = "auto"
    """CPUs on which trainer ranks run. auto: those closest to the rank's GPU (NVML); none: any CPU."""
    gpu: Literal["h100", "h200", "gb300"] | None = None
    """GPU type for `slimx plan`, which assumes the memory, link bandwidths and number of GPUs per node published for
    this type. null: the plan does not check whether memory suffices."""
    gpu_memory_gib: Positive | None = None
    """Memory of one GPU in GiB for `slimx plan`, without the half GiB that the driver reserves; null: the memory of the
    type `gpu`."""
    gpus_per_node: Size | None = None
    """GPUs per node for `slimx plan`; null: the usual number for the type `gpu`, or 8 if `gpu` is null too."""
    nodes: Size | None = None
    """Number of nodes available to the run, for `slimx plan`; null: as many as the run needs."""
    host_memory_gib: Positive | None = None
    """Host memory of one node in GiB for `slimx plan`; null: the usual amount for nodes with GPUs of the type `gpu`, or
    no check if `gpu` is null too."""

    @property
    def network(self) -> str | None:
        """CIDR of the network from which servers take their addresses; None if each takes the address that Ray has for
        its machine."""
        if self.ray_address is None:
            return LOOPBACK
        return self.trusted_network if isinstance(self.trusted_network, str) else None

    def _faults(self) -> Faults:
        if isinstance(self.trusted_network, str):
            try:
                ipaddress.ip_network(self.trusted_network, strict=False)
            except ValueError:
                yield (
                    "cluster.trusted_network",
                    "cluster.trusted_network",
                    f"cluster.trusted_network is {self.trusted_network!r}, which is not a network in CIDR notation; "
                    "set true or a network such as 10.0.0.0/16",
                )


class SavedRollouts(Section):
    every: Count = 1
    """Number of steps between saved files RUN/rollouts/step-NNNNNNN.groups, each with all groups of one step; 0:
    none."""
    keep: Count = 10
    """Number of most recent files to keep in RUN/rollouts; 0: all."""
    routes: bool = False
    """Together with the rollouts, save the experts that each token was routed to (MoE), several hundred bytes per token
    for a large model. Required to replay the rollouts (`rollout.replay`) with trainer.moe.routing_replay=R3."""


class Stall(Section):
    """Durations after which a phase of the run counts as stalled."""

    factor: Positive = 10.0
    """Multiple of a phase's usual duration after which the phase counts as stalled. The usual duration is the median of
    the last 20 times that this run completed the phase."""
    at_least: Seconds = 1800
    """Minimum number of seconds after which a phase counts as stalled, and the only limit for a phase that has not been
    completed before."""


class Prometheus(Section):
    """HTTP endpoint on the driver from which Prometheus scrapes metrics."""

    port: int | None = Field(None, ge=1, le=65535)
    """Port of /metrics, which returns the newest step's metrics and the metrics of every engine; null: no endpoint."""
    host: str = "127.0.0.1"
    """Address at which the endpoint listens. Requests are not authenticated."""


class Track(Section):
    tensorboard: bool = True
    """Write metrics, recorded samples as text, and the configuration to RUN/tensorboard."""
    wandb: bool = False
    """Log metrics, recorded samples and the configuration to Weights & Biases (requires the package wandb).
    WANDB_MODE=offline keeps them in RUN/wandb."""
    mlflow: str | None = None
    """Tracking URI, such as http://host:5000, of an MLflow server to which metrics, recorded samples and the
    configuration are logged (requires the package mlflow-skinny or mlflow); null: none."""
    swanlab: bool = False
    """Log metrics, recorded samples and the configuration to SwanLab (requires the package swanlab).
    SWANLAB_MODE=offline keeps them in RUN/swanlab."""
    project: str = "slimx"
    """Name of the project in Weights & Biases and SwanLab, and of the experiment in MLflow."""
    rollouts: SavedRollouts = SavedRollouts()
    samples: Count = 8
    """Number of rollouts written to RUN/samples.jsonl at each recorded step (`samples_every`)."""
    samples_every: Amount = 10
    """Interval, in steps, at which rollouts are recorded as samples."""
    report: bool = True
    """Write the report RUN/report.html when the run ends."""
    prometheus: Prometheus = Prometheus()
    """Metrics endpoint for Prometheus. configs/grafana.json is a Grafana dashboard for it."""
    stall: Stall = Stall()
    """Durations after which `slimx status` and the webhook report the run as stalled."""
    webhook: str | None = None
    """URL to which events such as stalled, engine_lost, failed and finished are posted as JSON (docs/operations.md);
    null: none. For a URL that contains a secret, write ${oc.env:NAME}: the secret is then not written to files."""

    def _faults(self) -> Faults:
        """Yields a fault if the webhook is not a URL. The message does not repeat the value, which may be a secret."""
        try:
            url = urlsplit("https://none" if self.webhook is None else self.webhook)
            good = url.scheme in ("http", "https") and url.hostname is not None and url.port != 0
        except ValueError:
            good = False
        if not good:
            yield (
                "track.webhook",
                "track.webhook",
                "track.webhook is not an http or https URL; set a URL such as https://example.com/KEY, or null",
            )


class Checkpoint(Section):
    every: Count = 0
    """Number of steps between checkpoints; 0: checkpoints are written only at the intervals of `every_seconds` and at
    the end of the run."""
    every_seconds: Seconds | None = 1800
    """Maximum number of seconds between checkpoints: once they have passed, a checkpoint is written at the end of the
    next step, regardless of `every`. This bounds the work that a crash can cost. null: `every` alone decides."""
    keep: Amount = 2
    """Number of most recent checkpoints to keep."""
    keep_every: Count = 0
    """Number of steps, a multiple of `every`, between checkpoints that are never deleted; 0: none."""
    asynchronous: bool = True
    """Write checkpoint files in the background, from a copy in host memory, while the run continues."""
    deadline: Seconds = 1800
    """Seconds within which all files of a checkpoint must be written."""
    grace: Seconds | None = None
    """Seconds allowed for writing a checkpoint after SIGTERM or SIGHUP. The run saves and ends as after SIGUSR1; if the
    time runs out or a second signal arrives, it ends without a checkpoint. null: it ends at once."""
    verify: Literal["size", "full"] = "full"
    """Check of a checkpoint's files before it is loaded. size: only their sizes; full: also their digests."""
    damaged: Literal["skip", "stop"] = "skip"
    """Action if the newest checkpoint of a resumed run is damaged. skip: log a warning, rename it to
    iter_NNNNNNN.damaged, and continue from the previous checkpoint, if there is one; stop: refuse to start."""
    load_optimizer: bool = True
    """Resume with the optimizer state; false: resume only the weights and the position in the run, and start with new
    moments."""
    export_hf: bool = False
    """Export the final weights as a Hugging Face directory, RUN/hf."""
    export_every: Count = 0
    """Number of steps between exports of the weights as Hugging Face directories, RUN/hf-NNNNNN, all of which are kept;
    0: none."""

    def _faults(self) -> Faults:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            schedule = "only by time and at the end (checkpoint.every is 0)"
            if self.every:
                schedule = f"every {counted(self.every, 'step')}"
            yield (
                "checkpoint.keep_every",
                "checkpoint.keep_every",
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written {schedule}; set it to a "
                "multiple of checkpoint.every",
            )


class Schedule(Section):
    steps: Amount = 100
    """Number of steps in the run. Each trains on prompts_per_step x group_size rollouts and publishes the weights
    once."""
    updates_per_step: Amount = 1
    """Number of optimizer updates per step, each of which trains on prompts_per_step / updates_per_step whole groups.
    The importance ratio in every update's loss is relative to the policy that sampled the tokens."""
    max_staleness: Count = 0
    """Maximum number of weight versions by which the oldest token of a trajectory may lag behind the weights from which
    the training step starts. 0: synchronous; 1: one step off-policy; more: fully asynchronous."""
    window: Count = 0
    """Number of batches by which a finished group may overtake an older unfinished group; it must not exceed
    max_staleness. 0: groups are trained on in the order of their prompts."""
    straggler_deadline: Seconds | None = None
    """Seconds that a batch waits for unfinished groups that must not be overtaken, counted from the moment at which
    enough other groups have finished. After that these groups are dropped and counted as dropped/straggler. null: no
    limit."""
    colocate: bool = False
    """Run trainers and engines on the same devices, where they alternate: one sleeps while the other runs."""
    step_deadline: Seconds = 3600
    """Seconds within which all rollouts of a step must be ready."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates in the whole run."""
        return self.steps * self.updates_per_step
