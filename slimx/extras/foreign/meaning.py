"""Meanings of flags and keys of other frameworks: a key of slimx with its value, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of a foreign name.

    - `key` alone: the value is the same.
    - `key` and `values`: foreign value -> value in slimx, or another meaning; other values are the same.
    - `key` and `note`: the value has to be computed, as the note explains.
    - `sets`: several keys with their values, regardless of the foreign value.
    - `note` alone: no key is needed, because slimx always behaves that way (`not_needed`) or does not support it.
    """

    key: str = ""
    """Key in slimx's configuration; "" if there is none. A `*` in the key stands for an entry of a list; `{}` stands
    for the part of the foreign name that the `*` of its entry in `Table` matched."""
    values: Mapping[str, str | Meaning] = field(default_factory=dict)
    """Foreign value in lower case -> value of `key`, or another Meaning if `key` has no such value."""
    closed: bool = False
    """True if `values` lists every valid foreign value."""
    prefix: str = ""
    """Text that is prepended to the foreign value to form the value in slimx."""
    note: str = ""
    not_needed: bool = False
    sets: Mapping[str, str] = field(default_factory=dict)

    def translate(self, value: str) -> str | Meaning | None:
        """Returns slimx's value for the foreign `value`. Returns another Meaning if `key` has no such value, for
        example because the foreign value sets other keys or is not supported; None if `value` is invalid."""
        translated = self.values.get(value.lower())
        if translated is not None:
            return translated
        return None if self.closed else self.prefix + value


Table = Mapping[str, str | Meaning]
"""Table of meanings by foreign name, with underscores instead of dashes. A meaning that is a string is the key of slimx
that takes the same value. A name that ends in `*` matches every name with this prefix."""


def table(entries: Table) -> dict[str, str | Meaning]:
    """Returns `entries` by single names: a key of `entries` has all names of a meaning, separated by spaces."""
    return {name: meaning for names, meaning in entries.items() for name in names.split()}


def not_needed(reason: str) -> Meaning:
    """Returns the meaning of a foreign option that needs no key, because slimx always behaves that way or another key
    determines it. `reason`: sentence that says which of these applies."""
    return Meaning(note=reason, not_needed=True)


def unsupported(reason: str) -> Meaning:
    """Returns the meaning of a foreign name that has no counterpart in slimx. `reason`: explanation that names the
    closest alternative."""
    return Meaning(note=reason)


def computed(key: str, how: str) -> Meaning:
    """Returns the meaning of a foreign name for which the value of `key` has to be computed from one or more foreign
    values. `how`: the formula or explanation."""
    return Meaning(key, note=how)


def choice(key: str, values: Mapping[str, str | Meaning]) -> Meaning:
    """Returns the meaning of a foreign name that has a fixed set of values. `values`: values of `key` by foreign
    values, separated by spaces."""
    return Meaning(key, table(values), closed=True)


def flag(key: str, value: str) -> Meaning:
    """Returns the meaning of a flag that takes no value and sets `key` to `value`."""
    return Meaning(key, {"true": value}, closed=True)


def settings(**keys: str) -> Meaning:
    """Returns the meaning of a foreign name that sets several keys of slimx. `keys`: values by key, with two
    underscores instead of each dot."""
    return Meaning(sets={key.replace("__", "."): value for key, value in keys.items()})


PER_UPDATE = computed("schedule.updates_per_step", "prompts_per_step * group_size / this batch size")
RANKS = computed("trainer.world_size", "nodes * GPUs per node")
EPOCHS = computed("schedule.steps", "prompts * epochs / rollout.prompts_per_step")
PACKED = not_needed(
    "sequences are balanced, and packed into micro-batches of up to trainer.max_tokens_per_microbatch tokens"
)
OF_MODEL = not_needed("the model's shapes and options come from config.json in model.path")
OF_ENGINES = not_needed("engines run SGLang, whose options are set in rollout.engines[].sglang")
REFERENCE_LAYOUT = not_needed("the reference uses the trainer's layout, and its weights are kept in host memory")
KL_ON = not_needed("algorithm.kl_coef above 0 with algorithm.reference: true turns the term on")
OFFLOADED = not_needed("with schedule.colocate trainers are always offloaded (trainer.offload)")
MEMORY = Meaning("rollout.engines.*.sglang.mem_fraction_static")
KL_KINDS = {"low_var_kl": "low_variance", "kl": "k1", "mse": "k2"}
ALGORITHMS = table(
    {
        "gae": "ppo",
        "reinforce reinforce++ reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline reinforce_baseline": "reinforce_pp_baseline",
        "group_norm grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "grpo_passk": unsupported("advantages over pass@k need a hook (algorithm.advantages)"),
    }
)
