"""slime's `args`: one namespace for a run, whose values come from slimx's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.json_types import Json

PREFIX = "slime:"
"""Prefix that marks a hook's dotted path in a configuration as written for slime."""
RESERVED = frozenset({"sglang_router_ip", "sglang_router_port", "sglang_model_routers", "hf_checkpoint"})
"""Attributes of `args` that only the run sets; `rollout.options` must therefore not contain them."""


class Arguments:
    """slime's `args`: the run's values, overridden by `rollout.options` (for rewards: by `reward.options`). An
    attribute that a hook sets lasts only for the current rollout."""

    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        # AttributeError makes getattr(args, name, default) return its default.
        hint = "" if name.startswith("__") else " by slimx; set it in rollout.options (for a reward: reward.options)"
        raise AttributeError(f"args.{name} is not set{hint}", name=name)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Values of a run that slime hooks need in every process; they can be sent to other processes as JSON values."""

    values: Json = field(default_factory=dict)
    """Attributes of the hooks' `args`, by name."""
    places: int = 1
    """Number of rollouts per group. The first sample indices of consecutive groups differ by this number."""
    eval_places: int = 1
    """Maximum number of rollouts per group in an evaluation."""

    @classmethod
    def of(cls, config: Config) -> RunFacts:
        """Returns the facts of a run with the configuration `config`. ReMax's greedy rollout counts as a rollout of its
        group."""
        group_size = config.rollout.group_size
        if config.algorithm.advantages.kind == "remax":
            group_size += 1
        return cls(
            _values(config),
            group_size,
            max((options.samples for options in config.eval.sets.values()), default=config.eval.samples),
        )

    def indices(self, group_id: str, index: int) -> tuple[int | None, int]:
        """Returns `group_index` and `index` of the sample for rollout `index` of a group. The returned `index` is
        unique in the run.

        As in slime, samples of an evaluation have no `group_index`. Raises SlimxError if `group_id` does not end in a
        number."""
        match = re.fullmatch(r"(\D*)(\d+)", group_id)
        if match is None:
            raise SlimxError(
                f"group id {group_id!r} does not end in a number, from which the indices of slime's samples are "
                "computed; use group ids of letters and a number, such as g17",
                code="slime.group_id",
                about=group_id,
            )
        kind = match[1]
        number = int(match[2])
        if kind == "eval":
            return None, number * self.eval_places + index
        return number, number * self.places + index


def addresses(ctx: Any) -> Json:
    """Returns the addresses of the engines as attributes of `args`, under slime's names. `ctx`: RolloutContext, or
    RewardContext, which has only frozen engines."""
    values: Json = {"sglang_model_routers": {name: _host_port(engine.url) for name, engine in ctx.engines.items()}}
    address = getattr(ctx, "address", None)
    if address is None:
        return values
    parts = urlsplit(address)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return values | {"sglang_router_ip": host, "sglang_router_port": parts.port}


def _values(config: Config) -> Json:
    """Returns the `args` attributes that publicly available slime hooks read and for which slimx has a value."""
    rollout = config.rollout
    reward = config.reward.function or ""
    engines = config.served.policy
    policy = engines[0].sglang if engines else {}
    return {
        "sglang_server_concurrency": rollout.concurrency,
        "sglang_tool_call_parser": policy.get("tool_call_parser"),
        "sglang_reasoning_parser": policy.get("reasoning_parser"),
        "hf_checkpoint": config.model.path,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "use_rollout_routing_replay": config.route_stride == 1,  # True: hooks need routed experts in every response
        "rollout_batch_size": rollout.prompts_per_step,
        "n_samples_per_prompt": rollout.group_size,
        "n_samples_per_eval_prompt": config.eval.samples,
        "rollout_seed": config.run.seed,
        "rollout_temperature": rollout.sampling.temperature,
        "rollout_top_p": rollout.sampling.top_p,
        "rollout_top_k": rollout.sampling.top_k,
        "rollout_stop": None,
        "rollout_stop_token_ids": list(rollout.sampling.stop_token_ids) or None,
        "rollout_skip_special_tokens": False,
        "rollout_max_response_len": rollout.sampling.max_new_tokens,
        "rollout_max_prompt_len": rollout.max_prompt_tokens,
        "rollout_max_context_len": None,
        "eval_max_response_len": config.eval.max_new_tokens or rollout.sampling.max_new_tokens,
        "eval_max_context_len": None,
        "max_tokens_per_gpu": config.trainer.max_tokens_per_microbatch // config.trainer.context,
        "context_parallel_size": config.trainer.context,
        "custom_generate_function_path": rollout.generate.removeprefix(PREFIX),
        "custom_rm_path": reward.removeprefix(PREFIX) if reward.startswith(PREFIX) else None,
        "rm_type": config.reward.options.get("rm_type"),
        "group_rm": config.reward.scope == "group",
        "reward_key": config.reward.options.get("reward_key"),
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {},
        "ci_test": False,
    }


def _host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80
