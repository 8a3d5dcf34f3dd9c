"""The configuration of one run: one typed model per section, every field described with its unit.

`slimx train FILE section.key=value` fills these models; an unknown key is refused with the nearest known one
(`slimx.config.load`). What a section says alone is checked by validators in its file; rules between sections, and those
that need the model, a machine or files, are entry points (`slimx.config.rule`).
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import PrivateAttr, ValidationError, ValidationInfo, create_model, model_validator

from slimx import entry_points
from slimx.config import suggestions, wording
from slimx.config.rule import Refusal, all_rules, broken, refuse
from slimx.config.section import Section, refuse_faults
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic, critic_trainer
from slimx.config.sections.engines import Engines
from slimx.config.sections.policies import ACTOR, Policy, derived, engine_faults, name_faults
from slimx.config.sections.publish import Publish
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import ROUTED_PER_STEP, Eval, Rollout
from slimx.config.sections.run import Checkpoint, Cluster, Model, Numerics, RunSection, Track
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError

CHECKED = {"checked": True}
"""Context for `Config.model_validate` of values that another process has checked: no rule is asked."""


class CoreConfig(Section):
    """One run, without the sections of extras."""

    run: RunSection
    model: Model
    numerics: Numerics = Numerics()
    cluster: Cluster = Cluster()
    trainer: Trainer = Trainer()
    rollout: Rollout
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic | None = None
    """Needed by `algorithm.advantages=gae` (ppo) and by nothing else; may be `{}`."""
    policies: dict[str, Policy] = {}
    """A mapping from names to policies that are trained beside the one of the run's own sections (docs/policies.md);
    each has these keys."""
    schedule: Schedule = Schedule()
    publish: Publish = Publish()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    track: Track = Track()

    _interpolated: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    """Texts with `${...}` as the file or an override had them, by path of keys and indices."""

    def to_text(self) -> str:
        """YAML of what the run was started with, for its directory and for trackers (`to_plain`)."""
        return yaml.safe_dump(self.to_plain(), sort_keys=False, allow_unicode=True)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, `${...}` as it was given: what `${oc.env:KEY}` stands for is written and sent nowhere."""
        plain = self.model_dump(mode="json")
        for (*path, last), text in self._interpolated.items():
            functools.reduce(operator.getitem, path, plain)[last] = text
        return plain

    @model_validator(mode="after")
    def _across(self, info: ValidationInfo) -> Config:
        if info.context is CHECKED:
            return self
        policies = self.policies if info.context is None else info.context  # of the run, if this is one of them
        refuse(broken(all_rules(), {**self.sections, "policies": policies}))
        refuse_faults(name_faults(self.policies))
        configs = self.by_policy
        refuse(broken(all_rules(), {"configs": configs}))
        refuse_faults(engine_faults({name: config.rollout.engines for name, config in configs.items()}))
        return self

    @property
    def sections(self) -> dict[str, Any]:
        """All sections by name: what rules can ask for of a configuration."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def section[S: Section](self, record: type[S]) -> S:
        """Returns the section of class `record`, such as one that an extra adds. Raises LookupError if no section is
        of this class."""
        for section in self.sections.values():
            if isinstance(section, record):
                return section
        raise LookupError(f"the configuration has no section {record.__name__}")

    def as_critic(self) -> Config:
        """The configuration of the critic's own model: its `trainer` section is what the critic's ranks follow. Raises
        SlimxError for a layout that does not fit its ranks."""
        if self.critic is None:
            raise SlimxError("there is no section critic")
        return self.model_copy(update={"trainer": critic_trainer(self.trainer, self.critic)})

    @property
    def by_policy(self) -> dict[str, Config]:
        """The configuration of each trained policy, first that of `actor`, which is this one: one policy's model,
        trainer, algorithm and engines each. Raises Refusal for values that do not fit."""
        out = {ACTOR: self}
        for name, policy in self.policies.items():
            if policy.shares is None:
                try:
                    tree = derived(self.model_dump(exclude_unset=True), name, policy)
                    out[name] = type(self).model_validate(tree, context=self.policies)
                except ValidationError as error:
                    raise _of_policy(name, error.errors()[0]) from None
                if policy.engines_of is not None:
                    out[name] = _borrowing(out[name])
        return out

    @property
    def trained(self) -> list[str]:
        """Names of the trained policies: the keys of `by_policy`."""
        return [ACTOR, *(name for name, policy in self.policies.items() if policy.shares is None)]

    @property
    def served_beside(self) -> list[str]:
        """Names of the policies for which the engines of `actor` generate, beside itself."""
        return [name for name, policy in self.policies.items() if policy.engines_of is not None]

    @property
    def roles(self) -> dict[str, str]:
        """The policy of each name that hooks may ask for: its own, or the one whose weights it shares."""
        return {ACTOR: ACTOR, **{name: policy.shares or name for name, policy in self.policies.items()}}

    @property
    def route_stride(self) -> int:
        """Rollouts among which one comes with its tokens' experts, tens of megabytes: 1 where all do, 0 where none
        does."""
        if not self.rollout.routed_experts:
            return 0
        replayed = any(each.trainer.moe.routing_replay == "R3" for each in self.by_policy.values())
        if replayed or self.track.rollouts.routes:
            return 1
        return max(1, self.rollout.prompts_per_step * self.rollout.group_size // ROUTED_PER_STEP)

    @property
    def exact(self) -> bool:
        """True if trainer and engines compute the same bits (`numerics.mode`)."""
        return self.numerics.exact

    def publishes_draft(self, group: Engines) -> bool:
        """True if servers of `group` draft tokens by the layer of multi-token prediction that the run trains."""
        return group.drafts and not group.frozen and bool(self.trainer.megatron.get("mtp_num_layers"))

    @property
    def serves_adapters(self) -> bool:
        """True if engines of the policy compute with adapters that are not merged into weights."""
        return self.publish.adapters == "alone"

    @property
    def samples_known(self) -> bool:
        """True if rollouts come with the trainer's own log-probs, to the last bit: without staleness this run's engines
        sampled every token with the weights that the step begins with. Those of a replay are another run's."""
        return self.exact and self.schedule.max_staleness == 0 and bool(self.rollout.policy_engines)

    @property
    def initial_weights(self) -> str:
        """Directory of the weights the run starts from, Hugging Face's or Megatron-LM's."""
        return self.trainer.load or self.model.path


if TYPE_CHECKING:
    Config = CoreConfig
else:
    Config = create_model(
        "Config",
        __base__=CoreConfig,
        __doc__="One run.",
        __module__=__name__,
        **{name: (section, section()) for name, section in entry_points.load_all("slimx.sections").items()},
    )


def _borrowing(config: Config) -> Config:
    """`config` of a policy with groups of servers that are another's."""
    groups = tuple(group.as_borrowed() for group in config.rollout.engines)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engines": groups})})


def _of_policy(name: str, item: Any) -> Refusal:
    """The refusal behind one of pydantic's errors in the configuration of the policy `name`."""
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        return Refusal(f"policies.{name}: {cause}", code=cause.code, about=f"policies.{name}.{cause.about}")
    where = ".".join([f"policies.{name}", *map(str, item["loc"])])
    if item["type"] == "extra_forbidden":
        hint = suggestions.for_key(Config, item["loc"], item["input"], override=False)
        return Refusal(f"unknown key {where}; {hint}", code="config.unknown_key", about=where)
    return Refusal(wording.value(where, item), code="policies.value", about=where)
