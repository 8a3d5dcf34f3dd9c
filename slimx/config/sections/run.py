"""Sections run, model, numerics, cluster, track and checkpoint: identity, placement and records of a run."""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from slimx.config.rule import Refusal
from slimx.config.section import Amount, Count, Faults, PathText, Positive, Seconds, Section, Size
from slimx.runtime.ports import LOOPBACK


class RunSection(Section):
    name: str = "run"
    """Name of the run in trackers and the report."""
    dir: PathText
    """Directory for everything that the run writes."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Seed of prompt order, sampling and initialization."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest complete checkpoint in `run.dir` if there is one."""
    fork: PathText | None = None
    """Checkpoint of another run (RUN/checkpoints/iter_NNNNNNN) that this one continues from, including its optimizer
    and waiting groups. It has no effect once run.dir has a checkpoint."""
    fork_prompts: Literal["continue", "anew"] = "continue"
    """Prompts of a forked run. continue: those of the other run, from its position; anew: this run's prompts from the
    first one, without the groups that were waiting, which suits the stages of a curriculum."""


class Model(Section):
    path: PathText
    """Hugging Face directory: config.json, tokenizer and safetensors."""
    family: str | None = None
    """Dotted path of a module that builds the model, for an architecture that slimx does not support
    (docs/models.md); null: the built-in module for the architecture in config.json."""


class Numerics(Section):
    mode: Literal["fast", "exact"] = "fast"
    """fast: stock kernels in trainer and engines, and the gap between their log-probs is measured; exact: the same
    operations in the same order in both, which makes log-probs bitwise equal (docs/numerics.md lists what is
    covered)."""
    leaves: Size | None = None
    """Exact mode: number of partial sums, a power of two, in which trainer and engines add up row-parallel products.
    Every tensor parallel size of trainer and engines must divide it. null: the largest of those sizes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and activations."""
    router_dtype: Literal["float32"] = "float32"
    """Dtype of the router's logits and softmax."""

    @property
    def exact(self) -> bool:
        """True if trainer and engines compute the same bits."""
        return self.mode == "exact"


class Cluster(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if torch finds a GPU, else cpu."""
    ray_address: str | None = None
    """Address of a running Ray cluster; null starts a local one."""
    trusted_network: bool | str | None = None
    """Network that only this run's users reach: true, or its CIDR, from which servers then take their address. Required
    by engines with `dp_attention` over several `nodes` (docs/engines.md)."""
    start_deadline: Seconds | None = None
    """Seconds until Ray, trainers and engines must be up. null: 300 on the CPU; on GPUs 600, for compilation, plus one
    for every GB of weights that a node reads."""
    ray_deadline: Seconds = 45
    """Seconds within which Ray's processes must respond; after that the run ends and names the silent process."""
    stop_deadline: Seconds = 120
    """Seconds from a signal or a failure until the process exits, even if its shutdown has not finished."""
    cpu_affinity: Literal["auto", "none"] = "auto"
    """auto: each trainer rank runs on the CPUs next to its GPU (NVML); none: anywhere."""
    gpu: Literal["h100", "h200", "gb300"] | None = None
    """Type of GPU for `slimx plan`, which has the memory, links and GPUs per node of each type. null: the plan does not
    judge whether memory suffices."""
    gpu_memory_gib: Positive | None = None
    """GiB of one GPU for `slimx plan`, without the half GiB that its driver reserves; null: by `gpu`."""
    gpus_per_node: Size | None = None
    """GPUs per node for `slimx plan`; null: by `gpu`, 8 if that is null too."""
    nodes: Size | None = None
    """Nodes available to the run, for `slimx plan`; null: as many as it needs."""
    host_memory_gib: Positive | None = None
    """GiB of a node's host memory for `slimx plan`; null: by `gpu`, not judged if that is null too."""

    @property
    def network(self) -> str | None:
        """CIDR from which servers take their address; None: they take the address that Ray has for their machine."""
        if self.ray_address is None:
            return LOOPBACK
        return self.trusted_network if isinstance(self.trusted_network, str) else None

    @field_validator("trusted_network")
    @classmethod
    def _cidr(cls, value: bool | str | None) -> bool | str | None:
        if isinstance(value, str):
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError:
                raise Refusal(
                    f"cluster.trusted_network is {value!r}; set true or a network such as 10.0.0.0/16",
                    code="cluster.trusted_network",
                    about="cluster.trusted_network",
                ) from None
        return value


class SavedRollouts(Section):
    every: Count = 1
    """Steps between files RUN/rollouts/step-NNNNNNN.groups, each with all groups of a step; 0: none."""
    keep: Count = 10
    """Number of these files to keep, the newest ones; 0: all."""
    routes: bool = False
    """Save each token's experts too (MoE), several hundred bytes per token for a large model. `rollout.replay` with
    trainer.moe.routing_replay=R3 needs them."""


class Stall(Section):
    """Limits after which a phase counts as stalled."""

    factor: Positive = 10.0
    """Multiple of a phase's usual duration (the median of its last 20 in this run) after which the phase counts as
    stalled."""
    at_least: Seconds = 1800
    """Seconds before which no phase is stalled. A phase without an earlier duration is stalled after them."""


class Prometheus(Section):
    """The driver's Prometheus endpoint."""

    port: int | None = Field(None, ge=1, le=65535)
    """Port of /metrics, which has the newest step's metrics and those of every engine; null: no endpoint."""
    host: str = "127.0.0.1"
    """Address that it listens on. Requests are not authenticated."""


class Track(Section):
    tensorboard: bool = True
    """Write RUN/tensorboard: metrics, recorded samples as text, the configuration."""
    wandb: bool = False
    """Log the same to Weights & Biases (needs the package wandb). WANDB_MODE=offline keeps it in RUN/wandb."""
    mlflow: str | None = None
    """Tracking URI of an MLflow server that gets the same, such as http://host:5000 (needs the package mlflow-skinny or
    mlflow); null: none."""
    swanlab: bool = False
    """Log the same to SwanLab (needs the package swanlab). SWANLAB_MODE=offline keeps it in RUN/swanlab."""
    project: str = "slimx"
    """Name of the project in Weights & Biases and SwanLab, and of the experiment in MLflow."""
    rollouts: SavedRollouts = SavedRollouts()
    samples: Count = 8
    """Rollouts written to RUN/samples.jsonl per recorded step."""
    samples_every: Amount = 10
    """Steps between recorded samples."""
    report: bool = True
    """Write RUN/report.html when the run ends."""
    prometheus: Prometheus = Prometheus()
    """Metrics for Prometheus. configs/grafana.json is a dashboard for them."""
    stall: Stall = Stall()
    """Limits after which `slimx status` and the webhook report a run as stalled."""
    webhook: str | None = None
    """URL to which events such as stalled, engine_lost, failed and finished are posted as JSON (docs/operations.md);
    null: none. Write ${oc.env:NAME} for a URL with a secret: it is then not written to files."""

    @field_validator("webhook")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        """Refuses a value that is not a URL, without repeating it, because it may be a secret."""
        if value is not None:
            try:
                url = urlsplit(value)
                good = url.scheme in ("http", "https") and url.hostname is not None and url.port != 0
            except ValueError:
                good = False
            if not good:
                raise Refusal(
                    "track.webhook is not a URL; set one such as https://hooks.example.com/services/KEY, or null",
                    code="track.webhook",
                    about="track.webhook",
                )
        return value


class Checkpoint(Section):
    every: Count = 0
    """Steps between checkpoints; 0: only by `every_seconds` and at the end."""
    every_seconds: Seconds | None = 1800
    """Seconds since the last checkpoint after which the end of a step writes another one, regardless of `every`. This
    bounds the work that a crash can cost. null: only by `every`."""
    keep: Amount = 2
    """Number of checkpoints to keep, the newest ones."""
    keep_every: Count = 0
    """Steps between checkpoints that are never deleted, a multiple of `every`; 0: none."""
    asynchronous: bool = True
    """Write files in the background, from a copy in host memory, while the run continues."""
    deadline: Seconds = 1800
    """Seconds within which all files of a checkpoint must be on disk."""
    grace: Seconds | None = None
    """Seconds for a checkpoint after SIGTERM or SIGHUP. The run saves and ends as after SIGUSR1; if the time is over or
    a second signal comes, it ends without a checkpoint. null: it ends at once."""
    verify: Literal["size", "full"] = "full"
    """Check of a checkpoint's files before it is loaded: their sizes only, or (full) their digests too."""
    damaged: Literal["skip", "stop"] = "skip"
    """Action of a resuming run whose newest checkpoint is damaged. skip: rename it to iter_NNNNNNN.damaged with a
    warning and continue from the one before, if there is one; stop: refuse to start."""
    load_optimizer: bool = True
    """Resume with the optimizer's state; false: only weights and position, with new moments."""
    export_hf: bool = False
    """Export the final weights as a Hugging Face directory (RUN/hf)."""
    export_every: Count = 0
    """Steps between exports as Hugging Face directories (RUN/hf-NNNNNN, all kept); 0: none."""

    def _faults(self) -> Faults:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            schedule = "only by time and at the end (checkpoint.every is 0)"
            if self.every:
                schedule = f"every {self.every} steps"
            yield (
                "checkpoint.keep_every",
                "checkpoint.keep_every",
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written {schedule}; make it a "
                "multiple of checkpoint.every",
            )
