"""The meaning of another program's flag or key here: a key and the value for it, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a foreign name.

    - `key` alone: the value stays as it is.
    - `key` and `values`: the value there -> the value here, or another meaning; other values stay as they are.
    - `key` and `note`: the value has to be worked out, and the note says how.
    - `sets`: several keys with their values, whatever stands there.
    - `note` alone: nothing is to be written, because slimx does it anyway (`not_needed`) or does not have it.
    """

    key: str = ""
    """Key of slimx; `*` stands for an entry of a list, `{}` for what the `*` of the foreign name stood for."""
    values: Mapping[str, str | Meaning] = field(default_factory=dict)
    """By the foreign value, in small letters."""
    closed: bool = False
    """True if `values` has all values that mean anything."""
    prefix: str = ""
    """Text that a value gets in front."""
    note: str = ""
    not_needed: bool = False
    sets: Mapping[str, str] = field(default_factory=dict)

    def of(self, value: str) -> str | Meaning | None:
        """The value here, or another meaning, for the value `value` there; None: this name does not take it."""
        found = self.values.get(value.lower())
        if found is None and self.closed:
            return None
        return self.prefix + value if found is None else found


Table = Mapping[str, str | Meaning]
"""Meanings by foreign name, with underscores for dashes; a text is the key of which the value stays as it is. A name
that ends in `*` stands for all that begin so."""


def not_needed(reason: str) -> Meaning:
    """Nothing is to be written: slimx does it anyway, or another key says it."""
    return Meaning(note=reason, not_needed=True)


def absent(reason: str) -> Meaning:
    """slimx has nothing of the kind; `reason` says what comes nearest."""
    return Meaning(note=reason)


def computed(key: str, how: str) -> Meaning:
    """The value of `key` follows from the foreign one, or from several."""
    return Meaning(key, note=how)


def chosen(key: str, values: Mapping[str, str | Meaning]) -> Meaning:
    """`key` takes one of a few values."""
    return Meaning(key, values, closed=True)


def switched(key: str, value: str) -> Meaning:
    """A flag without a value: `key` gets `value` where it is given."""
    return Meaning(key, {"true": value}, closed=True)


def setting(**keys: str) -> Meaning:
    """Several keys with their values, with two underscores for dots."""
    return Meaning(sets={key.replace("__", "."): value for key, value in keys.items()})


PER_UPDATE = computed("schedule.updates_per_step", "prompts_per_step * group_size over this batch size")
RANKS = computed("trainer.world_size", "nodes times GPUs per node")
EPOCHS = computed("schedule.steps", "prompts * epochs over rollout.prompts_per_step")
PACKED = not_needed("sequences are packed and balanced up to trainer.max_tokens_per_microbatch tokens")
OF_MODEL = not_needed("shapes and options of the model come from config.json in model.path")
OF_ENGINES = not_needed("engines are SGLang's; its own options go into rollout.engines[].sglang")
REFERENCE_LAYOUT = not_needed("the reference has the trainer's layout, and its weights stay in host memory")
KL_ON = not_needed("algorithm.kl_coef above 0 turns the term on, with algorithm.reference: true")
OFFLOADED = not_needed("with schedule.colocate trainers leave the device by themselves (trainer.offload)")
MEMORY = Meaning("rollout.engines.*.sglang.mem_fraction_static")
KL_KINDS = {"low_var_kl": "low_variance", "kl": "k1", "mse": "k2"}
ALGORITHMS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "grpo_passk": absent("advantages over pass@k are a hook, algorithm.advantages"),
}
