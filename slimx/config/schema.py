"""The configuration of one run: one typed model per section, with a description of every field and its unit.

`slimx train FILE section.key=value` fills these models (`slimx.config.load`). An unknown key is an error that suggests
the nearest known one. Validators in a section's file check that section alone. Rules between sections, and rules that
need the model, a machine or files, are entry points (`slimx.config.rule`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BeforeValidator, PrivateAttr, ValidationError, ValidationInfo, create_model, model_validator
from pydantic_core import ErrorDetails

from slimx import entry_points
from slimx.config import suggestions, wording
from slimx.config.rule import Refusal, refuse_broken
from slimx.config.section import Section, refuse_faults
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic, critic_trainer
from slimx.config.sections.engines import Engines, ServedEngines
from slimx.config.sections.eval import Eval
from slimx.config.sections.general import Checkpoint, Cluster, Model, Numerics, RunSection, Schedule, Track
from slimx.config.sections.policies import ACTOR, Policy, derived, engine_faults, name_faults
from slimx.config.sections.publish import Publish
from slimx.config.sections.reward import Reward
from slimx.config.sections.rollout import ROUTED_PER_STEP, Rollout
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.json_types import Json

CHECKED = {"checked": True}
"""Validation context for `Config.model_validate` that skips the rules between sections, for values that another process
has already validated."""


class CoreConfig(Section):
    """Configuration of one run, without the sections that extras add."""

    run: RunSection
    model: Model
    numerics: Numerics = Numerics()
    cluster: Cluster = Cluster()
    trainer: Trainer = Trainer()
    rollout: Rollout
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic | None = None
    """Value model of PPO. Required by `algorithm.advantages=gae` (preset ppo) and refused with any other estimator;
    null: no critic; `{}`: a critic with default settings."""
    policies: dict[str, Policy] = {}
    """Additional policies, by name, that are trained in the same run as the policy `actor`, which the run's top-level
    sections describe (docs/policies.md). Each policy has the following keys."""
    schedule: Schedule = Schedule()
    publish: Publish = Publish()
    checkpoint: Checkpoint = Checkpoint()
    eval: Annotated[Eval, BeforeValidator(lambda value: {} if value is None else value)] = Eval()
    track: Track = Track()

    _interpolated: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    """Texts of values with unresolved `${...}`, as written in the file or an override, by path of keys and list
    indices."""

    def to_text(self) -> str:
        """Returns the configuration as YAML, as saved in the run's directory and sent to experiment trackers. `${...}`
        stays unresolved, so that secrets are not exposed."""
        return yaml.safe_dump(self.to_plain(), sort_keys=False, allow_unicode=True)

    def to_plain(self, *, exclude_unset: bool = False) -> Json:
        """Returns the configuration as plain values, without defaults if `exclude_unset`. `${...}` stays unresolved, so
        that a secret read by `${oc.env:KEY}` is neither saved nor sent."""
        plain = self.model_dump(mode="json", exclude_unset=exclude_unset)
        for (*path, last), text in self._interpolated.items():
            parent: Any = plain  # a mapping or a list
            for key in path:
                parent = parent[key]
            parent[last] = text
        return plain

    @model_validator(mode="after")
    def _across(self, info: ValidationInfo) -> Config:
        if info.context is CHECKED:
            return self
        policies = self.policies if info.context is None else info.context  # the run's, for one of its policies
        facts = self.facts | {"policies": policies}
        refuse_broken(facts)
        refuse_faults(name_faults(self.policies))
        configs = self.by_policy
        refuse_broken(facts | {"configs": configs}, facts)
        refuse_faults(engine_faults({name: config.rollout.engines for name, config in configs.items()}))
        return self

    @property
    def facts(self) -> dict[str, object]:
        """Facts of the configuration, which every rule can use: all sections by name, and `served`."""
        return {name: getattr(self, name) for name in (*type(self).model_fields, "served")}

    @property
    def served(self) -> ServedEngines:
        """Engine groups that the run starts or connects to: those of `rollout.engines` and, if it evaluates, those of
        `eval.engines`; none if it replays rollouts."""
        if self.rollout.replay:
            return ServedEngines(())
        evaluation = self.eval.engines if self.eval.files else ()
        return ServedEngines((*self.rollout.engines, *evaluation), evaluation)

    def section[S: Section](self, record: type[S]) -> S:
        """Returns the section whose class is `record`, such as one that an extra adds. Raises LookupError if no section
        has this class."""
        for section in self.facts.values():
            if isinstance(section, record):
                return section
        raise LookupError(f"the configuration has no section {record.__name__}")

    def as_critic(self) -> Config:
        """Returns this configuration with `trainer` replaced by the settings of the critic's ranks. Raises SlimxError
        if there is no critic, or if `critic.layout` is invalid."""
        if self.critic is None:
            raise SlimxError("the configuration has no section critic; set critic={}")
        return self.model_copy(update={"trainer": critic_trainer(self.trainer, self.critic)})

    @property
    def by_policy(self) -> dict[str, Config]:
        """Configuration of each trained policy, by policy name, with the policy's own model, trainer, algorithm and
        engines. The first entry is `actor`, this configuration. Raises Refusal if a policy's values are invalid."""
        configs = {ACTOR: self}
        for name, policy in self.policies.items():
            if policy.shares is None:
                try:
                    tree = derived(self.model_dump(exclude_unset=True), name, policy)
                    configs[name] = type(self).model_validate(tree, context=self.policies)
                except ValidationError as error:
                    raise _of_policy(name, error.errors()[0]) from None
        return configs

    @property
    def trained(self) -> list[str]:
        """Names of the trained policies, `actor` first: the keys of `by_policy`."""
        names = [ACTOR]
        for name, policy in self.policies.items():
            if policy.shares is None:
                names.append(name)
        return names

    @property
    def served_by_actor(self) -> list[str]:
        """Names of the policies other than `actor` whose rollouts the engines of `actor` generate (`engines_of`)."""
        return [name for name, policy in self.policies.items() if policy.engines_of is not None]

    @property
    def roles(self) -> dict[str, str]:
        """Name of the trained policy that each role uses, by the role's name in hooks: the policy of the same name, or
        the one whose weights the role shares."""
        roles = {ACTOR: ACTOR}
        for name, policy in self.policies.items():
            roles[name] = policy.shares or name
        return roles

    @property
    def route_stride(self) -> int:
        """Interval, in rollouts, at which the experts that each token was routed to are returned: 1 for every rollout,
        n for one in n, 0 for none. The expert indices of one rollout take tens of megabytes."""
        if not self.rollout.routed_experts:
            return 0
        replayed = any(config.trainer.moe.routing_replay == "R3" for config in self.by_policy.values())
        if replayed or self.track.rollouts.routes:
            return 1
        return max(1, self.rollout.prompts_per_step * self.rollout.group_size // ROUTED_PER_STEP)

    @property
    def exact(self) -> bool:
        """True if trainer and engines compute bitwise equal values (`numerics.mode`)."""
        return self.numerics.exact

    def publishes_draft(self, group: Engines) -> bool:
        """Returns True if the servers of `group` use, as the draft model of speculative decoding, the
        multi-token-prediction (MTP) layer that the run trains."""
        return group.drafts and not group.frozen and bool(self.trainer.megatron.get("mtp_num_layers"))

    @property
    def serves_adapters(self) -> bool:
        """True if the policy's engines apply adapters as separate weights instead of receiving merged weights."""
        return self.publish.adapters == "alone"

    @property
    def engine_logprobs_exact(self) -> bool:
        """True if the engines' log-probs are bitwise equal to the trainer's. This holds in exact mode without
        staleness, because this run's engines then sample every token with the weights from which the step starts. False
        for replayed rollouts, which come from another run."""
        return self.exact and self.schedule.max_staleness == 0 and bool(self.served.policy)

    @property
    def initial_weights(self) -> str:
        """Directory of the run's initial weights, in Hugging Face or Megatron-LM format."""
        return self.trainer.load or self.model.path

    @property
    def images(self) -> str:
        """Directory of the image store, which contains the images of prompts: the run's own, or the replayed run's."""
        return f"{self.rollout.replay or self.run.dir}/images"


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


def _of_policy(name: str, item: ErrorDetails) -> Refusal:
    """Converts `item`, a pydantic error record raised by the configuration of the policy `name`, to an error."""
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        if cause.about.startswith(f"policies.{name}."):
            return cause
        return Refusal(f"policies.{name}: {cause}", code=cause.code, about=f"policies.{name}.{cause.about}")
    where = ".".join([f"policies.{name}", *map(str, item["loc"])])
    if item["type"] == "extra_forbidden":
        hint = suggestions.for_key(Config, item["loc"], item["input"], override=False)
        return Refusal(f"unknown key {where}; {hint}", code="config.unknown_key", about=where)
    return Refusal(wording.invalid_value(where, item, Config), code="policies.value", about=where)
