"""Predicts the CPU load of a run's driver and rollout workers, and the number of workers that `auto` stands for.

    engines' roofline, lengths --> Traffic --> times Costs, as measured --> Load --> number of workers

The costs are CPU times that benchmarks/rollout_scale.py measured; the traffic is a prediction: tokens are sampled as
fast as the engines' memory and arithmetic permit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from slimx.config.schema import Config
from slimx.config.sections.rollout import batches_in_flight
from slimx.layout.number_formats import ITEMSIZE
from slimx.models.families import ModelSpec, configured_model
from slimx.models.flops import sequence_flops
from slimx.preflight.hardware import GPUS, machine_of
from slimx.rollout.client.completion import ModelShape

TARGET = 0.5
"""Load of a worker, as a share of a core, above which `auto` adds workers: hooks and bursts need the rest."""
EFFICIENCY = 0.5
"""Assumed share of the GPU's memory bandwidth and of its arithmetic that decoding reaches."""
STEP_S = 0.008
"""Assumed shortest time in seconds in which an engine samples one token of every request."""
ANSWER_SHARE = 0.5
"""Assumed mean length of prompts and answers, as a share of the maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU time in milliseconds, of the driver where it says so, else of a worker."""

    rollout: float
    """Time for each rollout: its hook, rewards and columns."""
    request: float
    sent: float
    """Time for 1,000 tokens that requests send."""
    sampled: float
    """Time for 1,000 sampled tokens with their log-probs."""
    routes: float
    """Time for a million experts to which tokens were routed (tokens x layers x k)."""
    driver_second: float
    """Time of the driver for each second without rollouts."""
    driver: float
    """Time of the driver for each rollout."""
    driver_tokens: float
    """Time of the driver for 1,000 tokens of rollouts."""
    driver_routes: float
    """Time of the driver for a million experts that are kept with rollouts."""


COSTS = Costs(
    rollout=0.23,
    request=1.45,
    sent=0.0,
    sampled=0.55,
    routes=17.0,
    driver_second=4.2,
    driver=0.18,
    driver_tokens=0.063,
    driver_routes=3.5,
)
"""Costs that fit the measurements in docs/benchmarks.md (rollouts on workers): 2-core Intel Xeon, 2026-12-01."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Numbers per second that the rollouts of a run cause."""

    rollouts: float
    requests: float
    sent: float
    """Tokens that the requests send."""
    sampled: float
    kept: float
    """Tokens of rollouts: prompts, answers and tool results, each once."""
    routes: float = 0.0
    """Experts that the engines return: those of every layer, for every token of a request."""
    kept_routes: float = 0.0
    """Experts of the tokens of rollouts."""


@dataclass(frozen=True, slots=True)
class Load:
    """CPU time per second, as a share of a core."""

    driver: float
    """Load of the driver, which generates no rollout itself."""
    workers: float
    """Load of all workers together."""

    @property
    def needed(self) -> int:
        """Number of workers, at least 1, each with a load of at most `TARGET`."""
        return max(1, ceil(self.workers / TARGET))


def load_of(traffic: Traffic, costs: Costs = COSTS) -> Load:
    """Returns the load that `traffic` causes."""
    workers = traffic.rollouts * costs.rollout + traffic.requests * costs.request
    workers += (traffic.sent * costs.sent + traffic.sampled * costs.sampled) / 1e3 + traffic.routes * costs.routes / 1e6
    driver = costs.driver_second + traffic.rollouts * costs.driver + traffic.kept * costs.driver_tokens / 1e3
    driver += traffic.kept_routes * costs.driver_routes / 1e6
    return Load(driver=driver / 1e3, workers=workers / 1e3)


def traffic_of(config: Config, spec: ModelSpec) -> Traffic | None:
    """Returns the most that the engines of the policy can cause; None without engines on GPUs. If the type of GPU is
    unknown, it is assumed to be an H100.

    Every decoding step reads all weights of a server once and the KV cache of its requests. Prompts and answers have
    `ANSWER_SHARE` of their maximum length, and tool results the length of answers; a hook's option `max_turns` is the
    number of turns."""
    groups = config.served.sampling
    if config.cluster.device == "cpu" or not groups:
        return None
    rollout = config.rollout
    turns = turns_of(config)
    prompt = ANSWER_SHARE * rollout.max_prompt_tokens
    room = ANSWER_SHARE * config.trainer.max_tokens_per_microbatch - prompt
    answer = max(1.0, min(ANSWER_SHARE * rollout.sampling.max_new_tokens, room / (2 * turns - 1)))
    mean = prompt + (turns - 1) * answer
    in_flight = rollout.prompts_per_step * rollout.group_size * batches_in_flight(rollout, config.schedule)
    requests = min(rollout.concurrency, rollout.max_rollouts, in_flight)
    servers = sum(group.servers for group in groups)
    ranks = sum(group.servers * group.ranks for group in groups) / servers
    gpu = machine_of(config.cluster).gpu or GPUS["h100"]
    batch = requests / servers
    itemsize = 1 if config.publish.quantize else ITEMSIZE[config.numerics.dtype]
    weights = itemsize * sum(map(prod, spec.table.checkpoint_shapes().values()))
    read = (weights + batch * (mean + answer) * kv_bytes(spec)) / (ranks * gpu.bandwidth)
    computed = batch * sequence_flops(spec.transformer, spec.vocab_size, spec.layer_kind)(1) / 3 / (ranks * gpu.flops)
    sampled = requests / max(STEP_S, read / EFFICIENCY, computed / EFFICIENCY)
    sent = sampled / answer * mean
    rate = sampled / answer
    kept = rate / turns * (prompt + (2 * turns - 1) * answer)
    experts = 0.0
    # Without further policies, which may not permit the transport that the plan has chosen for this one.
    stride = config.model_copy(update={"policies": {}}).route_stride
    if stride:
        shape = ModelShape.of(spec)
        experts = shape.layers * shape.top_k / stride
    return Traffic(
        rollouts=rate / turns,
        requests=rate,
        sent=sent,
        sampled=sampled,
        kept=kept,
        routes=experts * (sent + sampled),
        kept_routes=experts * kept,
    )


def workers_for(config: Config) -> int:
    """Returns the number of rollout workers that `auto` stands for on a cluster."""
    traffic = traffic_of(config, configured_model(config))
    return 1 if traffic is None else load_of(traffic).needed


def turns_of(config: Config) -> int:
    """Returns the number of requests of a rollout, from the options of its hook."""
    turns = config.rollout.options.get("max_turns", 1)
    return turns if isinstance(turns, int) and turns > 0 else 1


def kv_bytes(spec: ModelSpec) -> int:
    """Returns the number of bytes of bf16 keys and values that one token takes in all layers, once per server."""
    model: dict[str, Any] = spec.transformer
    layers = sum(layer.mixer == "attention" for layer in spec.layer_kind.layers(model))
    if model.get("multi_latent_attention"):
        return 2 * layers * (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"])
    return 4 * layers * model["num_query_groups"] * model["kv_channels"]
