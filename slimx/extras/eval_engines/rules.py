"""Rules about evaluation engines."""

from __future__ import annotations

from collections.abc import Mapping

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.eval import Eval
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish


@rule("eval.engines_idle", "eval.engines")
def has_prompts(eval: Eval) -> Problems:
    if eval.engines and not eval.prompts and eval.every != 0 and "prompts" not in eval.model_fields_set:
        yield "eval.engines is set, but eval.prompts is missing; set eval.prompts to a file, or remove eval.engines"


@rule("eval.engines_scores", "eval.engines")
def samples(algorithm: Algorithm, served: ServedEngines) -> Problems:
    if algorithm.scores and served.evaluation:
        yield "eval.engines has no use, because the trainers evaluate a reward model; remove eval.engines"


@rule("eval.engines_role", "eval.engines")
def serves_alone(served: ServedEngines) -> Problems:
    for group in served.evaluation:
        for key in ("role", "frozen", "urls"):
            if getattr(group, key) != type(group).model_fields[key].default:
                yield f"{group.where} sets {key}, which evaluation engines cannot have; remove {key}"


@rule("eval.engines_name", "eval.engines")
def has_unique_names(served: ServedEngines) -> Problems:
    names = [group.name for group in served.groups]
    for group in served.evaluation:
        if names.count(group.name) > 1:
            yield f"several engine groups are named {group.name!r}, one of them in eval.engines; change its name"
            return


@rule("eval.engines_unproven", "eval.engines")
def is_proven(served: ServedEngines, publish: Publish, policies: Mapping[str, Policy]) -> Problems:
    """Rejects combinations that were never tested."""
    unproven = [f"policies.{name}" for name, policy in policies.items() if policy.shares is None]
    if publish.adapters == "alone":
        unproven.append("publish.adapters=alone")
    if served.evaluation:
        for key in unproven:
            yield f"eval.engines was never tested with {key}; remove eval.engines, or {key}"
