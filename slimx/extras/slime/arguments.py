"""slime's `args`: one namespace for a whole run, of which hooks get what slimx has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slimx.config.schema import Config
from slimx.errors import SlimxError

PREFIX = "slime:"
"""Before the dotted path of a hook of slime's form."""
TOLD = frozenset({"sglang_router_ip", "sglang_router_port", "sglang_model_routers", "hf_checkpoint"})
"""Names that only the run itself can say."""


class Arguments:
    """slime's `args`: the values that a run can give, and `rollout.options` (for rewards: `reward.options`). A hook may
    set more; they last for one rollout."""

    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        # AttributeError, so that getattr(args, name, default) has its default.
        where = "" if name.startswith("__") else " by slimx; give it in rollout.options (for a reward: reward.options)"
        raise AttributeError(f"args.{name} is not set{where}", name=name)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that slime hooks are told in every process: plain values."""

    values: dict[str, Any] = field(default_factory=dict)
    """Attributes of the `args` that hooks are given, by name."""
    places: int = 1
    """Rollouts of a group: by so many the numbers of its samples lie apart from the next group's."""
    eval_places: int = 1
    """Rollouts of a group in an evaluation."""

    @classmethod
    def of(cls, config: Config) -> RunFacts:
        """Take the facts of a configuration. ReMax's greedy rollout has a place in its group too."""
        greedy = config.algorithm.advantages.kind == "remax"
        return cls(_values(config), config.rollout.group_size + greedy, config.eval.samples)

    def indices(self, group_id: str, index: int) -> tuple[int | None, int]:
        """Number the sample of rollout `index` in a group: its `group_index` and its `index`, unique in the run.

        As in slime an evaluation's samples have no `group_index`. Raises SlimxError for an id without a number."""
        named = re.fullmatch(r"(\D*)(\d+)", group_id)
        if named is None:
            raise SlimxError(
                f"group {group_id!r} does not end in a number, by which slime's samples are numbered",
                code="slime.group_id",
                about=group_id,
            )
        kind, number = named[1], int(named[2])
        if kind == "eval":
            return None, number * self.eval_places + index
        return number, number * self.places + index


def addresses(ctx: Any) -> dict[str, Any]:
    """Addresses of the engines under slime's names. ctx: RolloutContext, or RewardContext, which has no policy's."""
    values = {"sglang_model_routers": {name: _place(each.url) for name, each in ctx.engines.items()}}
    if (address := getattr(ctx, "address", None)) is None:
        return values
    parts = urlsplit(address)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return values | {"sglang_router_ip": host, "sglang_router_port": parts.port}


def _values(config: Config) -> dict[str, Any]:
    """Attributes of `args` that published hooks read, as far as a run of slimx has them."""
    rollout = config.rollout
    own = config.reward.function or ""
    policy = rollout.policy_engines[0].sglang if rollout.policy_engines else {}
    return {
        "sglang_server_concurrency": rollout.concurrency,
        "sglang_tool_call_parser": policy.get("tool_call_parser"),
        "sglang_reasoning_parser": policy.get("reasoning_parser"),
        "hf_checkpoint": config.model.path,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "use_rollout_routing_replay": config.route_stride == 1,  # hooks then want those of every answer
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
        "eval_max_response_len": rollout.sampling.max_new_tokens,
        "eval_max_context_len": None,
        "max_tokens_per_gpu": config.trainer.max_tokens_per_microbatch // config.trainer.context,
        "context_parallel_size": config.trainer.context,
        "custom_generate_function_path": rollout.generate.removeprefix(PREFIX),
        "custom_rm_path": own.removeprefix(PREFIX) if own.startswith(PREFIX) else None,
        "rm_type": config.reward.options.get("rm_type"),
        "group_rm": config.reward.scope == "group",
        "reward_key": config.reward.options.get("reward_key"),
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {},
        "ci_test": False,
    }


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80
