"""Search for a foreign name in all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimx.extras.foreign.meaning import Meaning, Table
from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.openrlhf import OPENRLHF
from slimx.extras.foreign.slime import SLIME
from slimx.extras.foreign.trl import TRL
from slimx.extras.foreign.values import VALUES
from slimx.extras.foreign.verl import VERL

SHORT: Table = {
    "rollout.n": "rollout.group_size",
    "rollout.batch_size": "rollout.prompts_per_step",
    "rollout.max_tokens": "rollout.sampling.max_new_tokens",
    "rollout.sampling.n": "rollout.group_size",
    "rollout.sampling.max_tokens": "rollout.sampling.max_new_tokens",
    "rollout.sampling.stop": Meaning(
        "rollout.sampling.stop_token_ids", note="ids of tokens; texts that end a turn have no key"
    ),
    "trainer.steps": "schedule.steps",
    "trainer.gpus": "trainer.world_size",
    "algorithm.beta": "algorithm.kl_coef",
    "epochs": Meaning("schedule.steps", note="prompts * epochs over rollout.prompts_per_step"),
    "batch_size": "rollout.prompts_per_step",
    "gpus": "trainer.world_size",
    "nodes": "cluster.nodes",
    "max_tokens": "rollout.sampling.max_new_tokens",
    "model": "model.path",
    "prompts": "rollout.prompts",
    "dataset": "rollout.prompts",
    "output": "run.dir",
    "dir": "run.dir",
}
"""Short names that are unique."""
MOVED: Table = {
    "algorithm.clip_low": "algorithm.loss.low",
    "algorithm.clip_high": "algorithm.loss.high",
    "algorithm.dual_clip": "algorithm.loss.dual",
    "algorithm.sapo_tau_positive": "algorithm.loss.tau_positive",
    "algorithm.sapo_tau_negative": "algorithm.loss.tau_negative",
    "algorithm.cov_share": "algorithm.loss.share",
    "algorithm.cov_low": "algorithm.loss.covariance_low",
    "algorithm.cov_high": "algorithm.loss.covariance_high",
    "algorithm.cov_kl_coef": "algorithm.loss.coef",
    "algorithm.normalize_std": "algorithm.advantages.normalize_std",
    "algorithm.advantage_eps": "algorithm.advantages.eps",
    "algorithm.reward_weights": "algorithm.advantages.weights",
    "algorithm.step_coef": "algorithm.advantages.step_coef",
    "algorithm.gamma": "algorithm.advantages.gamma",
    "algorithm.gae_lambda": "algorithm.advantages.lam",
    "algorithm.whiten": "algorithm.advantages.whiten",
    "algorithm.dpo_beta": "algorithm.advantages.beta",
}
"""Parameters of losses and estimators where section algorithm would have them, each with its key."""
MOVED |= {key.removeprefix("algorithm."): moved for key, moved in MOVED.items()}
FLAGS: Sequence[Table] = (SLIME, MEGATRON, TRL, OPENRLHF, SHORT, MOVED)
"""Flags, which say the same in whatever section they are written. Flags that are called as a key is, such as --lr, are
not repeated here (slimx.config.suggestions)."""
PATHS: Sequence[Table] = (VERL, SHORT, MOVED)
"""Dotted keys, which mean something only where they stand."""


def of_key(name: str, value: str) -> Meaning | None:
    """Returns the meaning of a dotted key with `value`; None: no other framework has it."""
    return meaning(PATHS, name, value)


def of_flag(name: str, value: str) -> Meaning | None:
    """Returns the meaning of a flag with `value`; None: no other framework has it."""
    return meaning(FLAGS, name, value)


def of_word(key: str, word: str) -> str | Meaning | None:
    """Returns the value of `key` that people write as `word`, in small letters; None: nothing is known of it."""
    return VALUES.get(key, {}).get(word)


def meaning(tables: Sequence[Table], name: str, value: str) -> Meaning | None:
    """The meaning of `name` with `value` in the first table that has both, else that of the name alone; None: no table
    has it."""
    name = name.lower().replace("-", "_")
    found = [each for table in tables if (each := _entry(table, name)) is not None]
    return next((each for each in found if each.of(value) is not None), found[0] if found else None)


def _entry(table: Table, name: str) -> Meaning | None:
    """The entry of `name`, or the most exact one that ends in `*` and stands for it."""
    if (entry := table.get(name)) is not None:
        return _as_meaning(entry)
    begins = [key for key in table if key.endswith("*") and name.startswith(key[:-1])]
    if not begins:
        return None
    key = max(begins, key=len)
    found, rest = _as_meaning(table[key]), name[len(key) - 1 :]
    if found.key != "{}":
        return replace(found, key=found.key.replace("{}", rest))
    return _entry(MEGATRON, rest) or Meaning(f"trainer.megatron.{rest}")


def _as_meaning(entry: str | Meaning) -> Meaning:
    return Meaning(entry) if isinstance(entry, str) else entry
