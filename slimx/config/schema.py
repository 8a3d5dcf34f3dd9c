"""The configuration of one run: one typed model per section, every field described with its unit.

`slimx train FILE section.key=value` fills these models; an unknown key is refused with the nearest known one
(`slimx.config.load`). Checks that need only the configuration itself live here, and in the sections' files, as
validators; checks that need files, checkpoints or hooks live in `slimx.preflight`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from slimx.config.algorithm import Algorithm
from slimx.config.critic import Critic, CriticLayout
from slimx.config.exact import exact_problems, tree_leaves
from slimx.config.flow import flow_problems
from slimx.config.reward import Reward
from slimx.config.rollout import Eval, Rollout
from slimx.config.run import Cluster, Model, Numerics, Run, Track
from slimx.config.schedule import Checkpoint, Publish, Schedule
from slimx.config.section import Section
from slimx.config.serving import check_network, check_served_teacher, check_serving
from slimx.config.trainer import Trainer


class Config(Section):
    """One run."""

    run: Run
    model: Model
    numerics: Numerics = Numerics()
    cluster: Cluster = Cluster()
    trainer: Trainer = Trainer()
    rollout: Rollout
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic | None = Field(
        None, description="needed by `algorithm.advantages=gae` (ppo) and by nothing else; may be `{}`"
    )
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
    def _across(self) -> Config:
        if problems := [*self._algorithm_problems(), *self._problems()]:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        """Sections that do not fit each other, a sentence each."""
        for check in (
            lambda: self.critic and self.as_critic(),
            lambda: check_serving(self.rollout, self.schedule, self.publish),
            lambda: check_served_teacher(self.algorithm.teacher_engine, self.rollout),
            lambda: check_network(self.rollout, self.cluster.trusted_network),
        ):
            try:
                check()
            except ValueError as error:
                yield str(error)
        if self.exact:
            yield from exact_problems(
                self.numerics, self.trainer, self.rollout, self.algorithm, self.schedule, self.publish
            )
        elif self.numerics.leaves is not None:
            yield "numerics.leaves cuts sums in numerics.mode exact, and the mode is fast; leave it out"
        sampled = self.rollout.sampled
        if self.trainer.moe.replay == "R3" and not (sampled and self.rollout.routed_experts):
            missing = "rollout.routed_experts is false" if sampled else "rollout.engines is empty"
            yield (
                f"trainer.moe.replay is R3 but {missing}: there are no routes of an engine to replay; set "
                "rollout.routed_experts=true, or trainer.moe.replay=none or R2"
            )
        if self.eval.prompts and not sampled:
            yield "eval.prompts is set but rollout.engines is empty; evaluation needs an engine"
        if self.rollout.prompts_per_step % self.schedule.updates_per_step:
            yield (
                f"schedule.updates_per_step {self.schedule.updates_per_step} does not divide "
                f"rollout.prompts_per_step {self.rollout.prompts_per_step}: an update trains whole groups; change one "
                "of them"
            )
        yield from self._replay_problems()
        yield from flow_problems(self.rollout, self.schedule, self.algorithm)
        if self.schedule.colocate and self.publish.transport == "nccl":
            yield (
                "schedule.colocate and publish.transport=nccl exclude each other: NCCL connects no GPU with itself; "
                "set publish.transport=cuda_ipc"
            )
        if self.publish.quantise == "triton" and self.numerics.dtype == "float32":
            yield (
                "publish.quantise=triton is defined for bfloat16 weights, and numerics.dtype is float32; set it to "
                "bfloat16, or publish.quantise=ieee"
            )
        if not sampled and (self.schedule.max_staleness or self.schedule.colocate):
            yield "schedule.max_staleness and schedule.colocate need engines; rollout.engines is empty"

    def _replay_problems(self) -> Iterator[str]:
        """What training on saved rollouts excludes."""
        if self.rollout.replay is None:
            return
        if self.schedule.colocate:
            yield (
                "rollout.replay and schedule.colocate exclude each other: a replay has no engines to take turns with; "
                "set schedule.colocate=false"
            )
        if Path(self.rollout.replay).resolve() == Path(self.run.dir).resolve():
            yield (
                f"rollout.replay is run.dir itself ({self.run.dir}); choose another run.dir for what is trained again"
            )

    def _algorithm_problems(self) -> Iterator[str]:
        """What the algorithm needs of the other sections."""
        algorithm, name, size = self.algorithm, self.algorithm.name, self.rollout.group_size
        demonstrated = algorithm.loss == "sft" or algorithm.advantages == "dpo"
        if not demonstrated and not self.rollout.sampled and not self.rollout.replay:
            have = "holds frozen groups only" if self.rollout.engines else "is empty"
            yield f"algorithm.name is {name} but rollout.engines {have}; add an engine group or use sft"
        if not demonstrated and algorithm.advantages != "none" and not self.reward.given:
            yield f"algorithm.name is {name} but reward.function is null; name a reward hook"
        if algorithm.advantages == "gae" and self.critic is None:
            yield f"algorithm.name is {name}, which needs a critic; add a section `critic: {{}}`"
        if algorithm.advantages != "gae" and self.critic is not None:
            yield f"critic is given but algorithm.name is {name}, which has none; remove it or use ppo"
        if algorithm.group_relative and size == 1 and not algorithm.teacher_coef:
            yield (
                f"rollout.group_size is 1, but algorithm.name is {name} (advantages {algorithm.advantages}), which "
                "compares the rollouts of a prompt: every advantage would be 0; raise it"
            )
        if algorithm.advantages == "dpo" and not self.rollout.engines and (size != 2 or self.reward.given):
            yield (
                "algorithm.advantages is dpo without engines: pairs come from the prompt file, two rollouts each, and "
                "say themselves which is chosen; set rollout.group_size=2, reward.function=null and "
                "rollout.generate=slimx.rollout.preferences.generate"
            )
        if algorithm.advantages == "dpo" and self.trainer.moe.replay != "none":
            raise ValueError(
                f"algorithm.advantages is dpo and trainer.moe.replay {self.trainer.moe.replay}: a pair's margin is "
                "measured before routes are replayed; set trainer.moe.replay=none"
            )
        if algorithm.advantages == "dpo" and self.schedule.updates_per_step > 1:
            yield (
                f"algorithm.advantages is dpo and schedule.updates_per_step {self.schedule.updates_per_step}: the "
                "margin of a pair is that of the weights before a step's first update; set it to 1, and "
                "rollout.prompts_per_step to what one update trains"
            )

    def as_critic(self) -> Config:
        """The configuration of the critic's own model: its `trainer` section is what the critic's ranks follow. Raises
        ValueError for a layout that does not fit its ranks."""
        if self.critic is None:
            raise ValueError("there is no section critic")
        changes: dict[str, Any] = {
            "load": self.critic.load or self.trainer.load,
            "optimizer": self.critic.optimizer,
            "freeze": (),  # patterns for the policy
            # Layers of multi-token prediction learn from labels; a critic has none.
            "megatron": {key: value for key, value in self.trainer.megatron.items() if key != "mtp_num_layers"},
        }
        if self.critic.placement == "own":
            changes |= dict(self.critic.layout or CriticLayout())
        try:
            trainer = Trainer.model_validate({**dict(self.trainer), **changes})
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(message.replace("trainer.", "critic.layout.")) from None
        return self.model_copy(update={"trainer": trainer})

    @property
    def exact(self) -> bool:
        """Whether trainer and engines compute the same bits (`numerics.mode`)."""
        return self.numerics.mode == "exact"

    @property
    def leaves(self) -> int | None:
        """Leaves of the sums of row-parallel products in exact mode, given or derived; None in fast mode."""
        return tree_leaves(self.numerics, self.trainer, self.rollout) if self.exact else None

    @property
    def samples_known(self) -> bool:
        """Whether rollouts come with the trainer's own log-probs, to the last bit: without staleness this run's engines
        sampled every token with the weights that the step begins with. Those of a replay are another run's."""
        return self.exact and self.schedule.max_staleness == 0 and bool(self.rollout.policy_engines)

    @property
    def served_rule(self) -> str | None:
        """Rule by which the trainer rounds its weights before it computes with them, as engines hold them in exact
        mode; None: they are the same."""
        return self.publish.quantise if self.exact else None

    @property
    def initial_weights(self) -> str:
        """Directory of the weights the run starts from, Hugging Face's or Megatron-LM's."""
        return self.trainer.load or self.model.path
