"""Lookup of names of other frameworks in all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimx.extras.foreign.meaning import EPOCHS, Meaning, Table, not_needed, table
from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.openrlhf import OPENRLHF
from slimx.extras.foreign.slime import SLIME
from slimx.extras.foreign.trl import TRL
from slimx.extras.foreign.values import VALUES
from slimx.extras.foreign.verl import VERL

SHORT: Table = table(
    {
        "rollout.n rollout.sampling.n": "rollout.group_size",
        "rollout.batch_size batch_size": "rollout.prompts_per_step",
        "rollout.max_tokens rollout.sampling.max_tokens max_tokens": "rollout.sampling.max_new_tokens",
        "rollout.sampling.stop": Meaning(
            "rollout.sampling.stop_token_ids", note="token ids; stop strings are not supported"
        ),
        "trainer.steps": "schedule.steps",
        "trainer.gpus gpus": "trainer.world_size",
        "algorithm.beta": "algorithm.kl_coef",
        "epochs": EPOCHS,
        "nodes": "cluster.nodes",
        "model": "model.path",
        "prompts dataset": "rollout.prompts",
        "output dir": "run.dir",
        "webhook alerts.webhook": "track.webhook",
    }
)
"""Short names that users may write for a key of slimx; each one is unambiguous."""
MOVED: dict[str, str | Meaning] = {
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
"""Parameters of losses and advantage estimators, by the names under which users may look for them directly in section
`algorithm`."""
MOVED |= {key.removeprefix("algorithm."): moved for key, moved in MOVED.items()}
FLAGS: Sequence[Table] = (SLIME, MEGATRON, TRL, OPENRLHF, SHORT, MOVED)
"""Tables of flags, which have the same meaning in every section. Flags that differ from a key only in dashes, such as
--lr, need no entry (slimx.config.suggestions)."""
FILES: Table = table(
    {
        "config config_file config_path config_name config_dir cfg yaml": not_needed(
            "the YAML file is the first argument, without a flag, as in `slimx train run.yaml`"
        )
    }
)
"""Flags of other programs for the file with the settings."""
PATHS: Sequence[Table] = (VERL, SHORT, MOVED, FILES)
"""Tables of dotted keys; the meaning of such a key depends on its section."""


def of_key(name: str, value: str) -> Meaning | None:
    """Returns the meaning of the dotted key `name` when set to `value`; None if no framework in the tables has such a
    key."""
    return meaning(PATHS, name, value)


def of_flag(name: str, value: str) -> Meaning | None:
    """Returns the meaning of the command-line flag `name` (without leading dashes) when set to `value`; None if no
    framework in the tables has such a flag."""
    return meaning(FLAGS, name, value)


def of_word(key: str, word: str) -> str | Meaning | None:
    """Returns the valid value of slimx's `key` that corresponds to `word` (a value as users write it, in lower case),
    or a meaning that explains why there is none. Returns None if the word is unknown."""
    return VALUES.get(key, {}).get(word)


def meaning(tables: Sequence[Table], name: str, value: str) -> Meaning | None:
    """Returns the meaning of `name` from the first of `tables` that accepts `value` for it. If none does, returns the
    meaning from the first table that contains the name; None if no table contains it."""
    name = name.lower().replace("-", "_")
    first = None
    for entries in tables:
        entry = _entry(entries, name)
        if entry is not None and entry.translate(value) is not None:
            return entry
        first = first or entry
    return first


def _entry(table: Table, name: str) -> Meaning | None:
    """Returns the entry for `name` in `table`: the one with exactly this name or, failing that, the one with the
    longest matching pattern (a prefix followed by `*`). Returns None if no entry matches."""
    entry = table.get(name)
    if entry is not None:
        return _as_meaning(entry)
    patterns = [key for key in table if key.endswith("*") and name.startswith(key[:-1])]
    if not patterns:
        return None
    pattern = max(patterns, key=len)
    rest = name[len(pattern) - 1 :]
    matched = _as_meaning(table[pattern])
    if matched.key != "{}":
        return replace(matched, key=matched.key.replace("{}", rest))
    return _entry(MEGATRON, rest) or Meaning("trainer.megatron." + rest)


def _as_meaning(entry: str | Meaning) -> Meaning:
    return Meaning(entry) if isinstance(entry, str) else entry
