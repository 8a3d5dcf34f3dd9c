"""Sections run, model, numerics, cluster and track: what is run, where, and who is told."""

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
    """Directory that holds everything the run writes."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Seed of prompt order, sampling and initialisation."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest complete checkpoint in `run.dir` if there is one."""
    fork: PathText | None = None
    """Checkpoint of another run (RUN/checkpoints/iter_NNNNNNN) that this one continues from, optimizer and waiting
    groups included, while run.dir has none of its own."""
    fork_prompts: Literal["continue", "anew"] = "continue"
    """Prompts of a run that forks. anew: its own from their beginning, without the groups that were waiting, so that
    the stages of a curriculum may have different prompts."""


class Model(Section):
    path: PathText
    """Hugging Face directory: config.json, tokenizer and safetensors."""
    family: str | None = None
    """Dotted path of a module that says how to build the model, for an architecture that slimx does not bring
    (docs/models.md); null: the one of config.json's architecture."""


class Numerics(Section):
    mode: Literal["fast", "exact"] = "fast"
    """fast: stock kernels on both sides, the gap is measured; exact: the same operations in the same order on both
    sides, so that log-probs are equal to the last bit (docs/numerics.md says what is covered)."""
    leaves: Size | None = None
    """exact: parts, a power of two, into which the sums of row-parallel products are cut on both sides, so that every
    tensor parallel size of trainer and engines divides them; null: the largest of those sizes."""
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
    """auto: cuda where torch sees a GPU, else cpu."""
    ray_address: str | None = None
    """Address of a running Ray cluster; null starts a local one."""
    trusted_network: bool | str | None = None
    """Network on which nobody but this run's users sends anything: true, or its CIDR, in which every machine's servers
    then take their address (without it: the one by which Ray knows the machine). Engines with `dp_attention` over
    several `nodes` need it (docs/engines.md)."""
    start_deadline: Seconds | None = None
    """Seconds until Ray, trainers and engines must be up; null: 300 on the CPU, and on GPUs 600 for compilation and one
    for every GB of weights that a node reads."""
    ray_deadline: Seconds = 45
    """Seconds in which Ray's processes must answer; later the run ends, and says which is silent."""
    stop_deadline: Seconds = 120
    """Seconds from a signal or a failure until the process ends, in order or not."""
    cpu_affinity: Literal["auto", "none"] = "auto"
    """auto: each trainer rank runs on the CPUs next to its GPU (NVML); none: anywhere."""
    gpu: Literal["h100", "h200", "gb300"] | None = None
    """GPUs that `slimx plan` plans for; it knows memory, links and GPUs per node of each. null: whether memory suffices
    is not judged."""
    gpu_memory_gib: Positive | None = None
    """GiB of one GPU for `slimx plan`, without the half GiB that its driver keeps; null: by `gpu`."""
    gpus_per_node: Size | None = None
    """GPUs of a node for `slimx plan`; null: by `gpu`, 8 without one."""
    nodes: Size | None = None
    """Nodes that the run gets, for `slimx plan`; null: as many as it needs."""
    host_memory_gib: Positive | None = None
    """GiB of a node's host memory for `slimx plan`; null: by `gpu`, not judged without one."""

    @property
    def network(self) -> str | None:
        """CIDR in which servers take their address; None: it is the one by which Ray knows their machine."""
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
                    f"cluster.trusted_network is {value!r}; give true or a network such as 10.0.0.0/16",
                    code="cluster.trusted_network",
                    about="cluster.trusted_network",
                ) from None
        return value


class SavedRollouts(Section):
    every: Count = 1
    """Steps between files RUN/rollouts/step-NNNNNNN.groups with all groups of a step; 0: none."""
    keep: Count = 10
    """Newest of these files that stay; 0: all do."""
    routes: bool = False
    """Keep the experts of each token too (MoE), several hundred bytes each for a large model; `rollout.replay` needs
    them with trainer.moe.routing_replay=R3."""


class Stall(Section):
    """A phase that takes so long that somebody should look."""

    factor: Positive = 10.0
    """Times of its usual duration, the median of its last 20 in this run, after which a phase is called stalled."""
    at_least: Seconds = 1800
    """Seconds before which none is, and after which one is that has no earlier duration."""


class Prometheus(Section):
    """The driver's Prometheus endpoint."""

    port: int | None = Field(None, ge=1, le=65535)
    """Port at which /metrics has the newest step's metrics and those of every engine; null: there is none."""
    host: str = "127.0.0.1"
    """Address at which it listens. It asks nobody who they are."""


class Track(Section):
    tensorboard: bool = True
    """Write RUN/tensorboard: metrics, recorded samples as text, the configuration."""
    wandb: bool = False
    """Log the same to Weights & Biases (needs the wandb package); WANDB_MODE=offline keeps it in RUN/wandb."""
    mlflow: str | None = None
    """Tracking URI of an MLflow server to log the same to, such as http://host:5000 (needs the package mlflow-skinny or
    mlflow); null: none."""
    swanlab: bool = False
    """Log the same to SwanLab (needs the swanlab package); SWANLAB_MODE=offline keeps it in RUN/swanlab."""
    project: str = "slimx"
    """Name of the project in wandb and SwanLab, of the experiment in MLflow."""
    rollouts: SavedRollouts = SavedRollouts()
    samples: Count = 8
    """Rollouts written to RUN/samples.jsonl per recorded step."""
    samples_every: Amount = 10
    """Steps between recorded samples."""
    report: bool = True
    """Write RUN/report.html when the run ends."""
    prometheus: Prometheus = Prometheus()
    """Metrics for Prometheus; configs/grafana.json is a dashboard of them."""
    stall: Stall = Stall()
    """When `slimx status` and the webhook call a run stalled."""
    webhook: str | None = None
    """URL to which events such as stalled, engine_lost, failed and finished are posted as JSON (docs/operations.md).
    ${oc.env:NAME} keeps one that holds a secret out of files; null: none."""

    @field_validator("webhook")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        """Refuses what is no URL without repeating it: it may be a secret."""
        if value is not None:
            try:
                url = urlsplit(value)
                good = url.scheme in ("http", "https") and url.hostname is not None and url.port != 0
            except ValueError:
                good = False
            if not good:
                raise Refusal(
                    "track.webhook is no URL; give one such as https://hooks.example.com/services/KEY, or null",
                    code="track.webhook",
                    about="track.webhook",
                )
        return value


class Checkpoint(Section):
    every: Count = 0
    """Steps between checkpoints; 0: by `every_seconds` alone, and at the end."""
    every_seconds: Seconds | None = 1800
    """Seconds after which the next step that ends is followed by a checkpoint, whatever `every` says: what a crash can
    cost; null: by `every` alone."""
    keep: Amount = 2
    """Newest checkpoints kept."""
    keep_every: Count = 0
    """Checkpoints of every so many steps are kept for good; 0: none is."""
    asynchronous: bool = True
    """Write files in the background from a copy in host memory, while the run goes on."""
    deadline: Seconds = 1800
    """Seconds until all files of a checkpoint must be on disk."""
    grace: Seconds | None = None
    """Seconds that SIGTERM, or SIGHUP, leaves for a checkpoint: the run saves and ends as after SIGUSR1, or without a
    checkpoint when they are over or a second signal comes; null: it ends at once."""
    verify: Literal["size", "full"] = "full"
    """Before a checkpoint is loaded, compare its files' sizes only, or their digests too."""
    damaged: Literal["skip", "stop"] = "skip"
    """Treatment of a newest checkpoint that is damaged when a run resumes: skip renames it to iter_NNNNNNN.damaged,
    says so and goes on from the one before, if there is one; stop refuses to start."""
    load_optimizer: bool = True
    """Resume with the optimizer's state; false: weights and position only, moments begin anew."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face directory (RUN/hf)."""
    export_every: Count = 0
    """Steps between exports as Hugging Face directories (RUN/hf-NNNNNN, all kept); 0: none."""

    def _faults(self) -> Faults:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            yield (
                "checkpoint.keep_every",
                "checkpoint.keep_every",
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written "
                + (f"every {self.every} steps" if self.every else "by time and at the end only (checkpoint.every is 0)")
                + "; make it a multiple of checkpoint.every",
            )
