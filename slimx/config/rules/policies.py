"""Rules about several trained policies: what was never proven with them is refused, and credit that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slimx.config.rule import Told, broken, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.policies import ACTOR, Policy
from slimx.config.sections.publish import Publish
from slimx.config.sections.recovery import Recovery
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Numerics, RunSection
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError


@rule("policies.proven", about="policies")
def proven(
    policies: Mapping[str, Policy],
    run: RunSection,
    numerics: Numerics,
    trainer: Trainer,
    rollout: Rollout,
    algorithm: Algorithm,
    critic: Critic | None,
    schedule: Schedule,
    publish: Publish,
    recovery: Recovery,
) -> Iterator[Told]:
    if all(policy.shares is not None for policy in policies.values()):
        return
    apart = any(policy.shares is None and policy.engines_of is None for policy in policies.values())
    for key, given in (
        ("run.fork", run.fork is not None),
        ("numerics.mode", numerics.exact),
        ("trainer.lora", trainer.lora is not None and apart),
        ("rollout.engines", not rollout.sampled),
        ("rollout.engines.urls", any(group.urls for group in rollout.policy_engines)),
        ("rollout.replay", rollout.replay is not None),
        ("algorithm.advantages", algorithm.needs_whole_step or algorithm.advantages.kind == "remax"),
        ("algorithm.loss", algorithm.loss.kind in ("sft", "bradley_terry")),
        ("algorithm.teacher", algorithm.taught),
        ("algorithm.reference_refresh", algorithm.reference_refresh > 0),
        ("critic", critic is not None),
        ("schedule.max_staleness", schedule.max_staleness > 0),
        ("schedule.colocate", schedule.colocate),
        ("publish.transport", publish.transport not in ("auto", "memory")),
        ("publish.quantise", publish.quantise is not None),
        ("recovery.trainers", recovery.trainers > 0),
    ):
        if given:
            yield (
                key,
                f"{key} as it is set was never proven with several trained policies; leave it at its default, or take "
                "the further ones out of policies",
            )


def fits_engines(name: str, own: Mapping[str, Any], run: Mapping[str, Any]) -> list[SlimxError]:
    """Refusals of the sections `own` of the policy `name`, which the engines of the run's own policy generate for:
    these hold one base, that of the run's own sections, and slots of one shape."""
    publish, model, trainer = run["publish"], run["model"], run["trainer"]
    theirs, lora = own["trainer"], trainer.lora
    if publish.adapters != "alone" or lora is None:
        return [
            SlimxError(
                f"policies.{name}.engines_of has the actor's engines generate for it, which hold one set of weights; "
                "train adapters beside them (trainer.lora) and publish these alone (publish.adapters=alone), or leave "
                "it out",
                code="policies.engines_of",
                about="publish.adapters" if lora is not None else "trainer.lora",
            )
        ]
    found: list[SlimxError] = []
    for key, here, there in (
        ("model", own["model"], model),
        ("trainer.load", theirs.load, trainer.load),
        ("trainer.lora", theirs.lora is None, False),
        ("trainer.lora.rank", theirs.lora and theirs.lora.rank, lora.rank),
        ("trainer.lora.targets", theirs.lora and theirs.lora.targets, lora.targets),
    ):
        if here != there:
            found.append(
                SlimxError(
                    f"policies.{name}.{key} is not the actor's, whose engines generate for it (engines_of): they hold "
                    "one base, and adapters of one shape; make it equal, or give the policy engines of its own",
                    code="policies.engines_of",
                    about=f"policies.{name}.{key}",
                )
            )
    return found


@rule("policies.shared_credit", about="algorithm.credit")
def divides(policies: Mapping[str, Policy], algorithm: Algorithm) -> Iterator[str]:
    """The mean of a rollout's rewards does not change where each trajectory has it."""
    alone = all(policy.shares is not None for policy in policies.values())
    if algorithm.credit == "shared" and alone and algorithm.advantages.kind in ("grpo", "gpg", "rloo", "opo"):
        yield (
            f"algorithm.credit=shared changes nothing: advantages by {algorithm.advantages} compare rollouts by the "
            "mean reward of their trajectories, and one policy is trained; leave it out, or set algorithm.advantages "
            "to one that takes each trajectory's reward (reinforce, reinforce_baseline, gae)"
        )


def proven_for(name: str, sections: Mapping[str, Any], policies: Mapping[str, Policy]) -> list[SlimxError]:
    """Refusals by `proven` of the `sections` of the policy `name`, one of the run's `policies`."""
    if name == ACTOR:
        return []  # asked with all other rules
    found = broken((proven,), {**sections, "policies": policies})
    return [
        SlimxError(f"policies.{name}: {problem}", code=problem.code, about=f"policies.{name}.{problem.about}")
        for problem in found
    ]
