"""Everything about a run that can be known to be wrong before Ray, trainers or engines start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from slimx.adapters.transformers import import_transformers
from slimx.cluster.connection import device_of
from slimx.config.rule import broken, refuse
from slimx.config.schema import Config
from slimx.data.records import Prompt
from slimx.engines.fleet.group import spec_values
from slimx.engines.server.spec import EngineSpec, server_args
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, configured_model
from slimx.models.flops import delta_net_layers
from slimx.models.state_space import layers_of
from slimx.orchestration.prompts import heldout_prompts, make_source, run_tokenizer, training_prompts
from slimx.preflight.checks import RULES, model_facts, weight_facts
from slimx.preflight.checks.layout import critic_keys
from slimx.preflight.effects.probe import try_hooks
from slimx.preflight.transport import ChosenTransport, choose_transport
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import export_plan, publication_plan
from slimx.rewards.mixture import Mixture
from slimx.rollout.client.teacher import check_taught
from slimx.rollout.flow.replay import NO_HOOKS
from slimx.rollout.hook_loading import Hooks, check_answers, check_generated, check_prompts, load_hooks
from slimx.rollout.preferences import check_pair
from slimx.trainer.device.backends import Backends, choose_backends, installed
from slimx.trainer.model.check import check_transformer

PAIRS = "slimx.rollout.preferences.generate"
"""The hook whose prompts are checked to be pairs before anything starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that rollouts are made of."""

    spec: ModelSpec
    hooks: Hooks
    tokenizer: Any
    by_source: dict[str, list[Prompt]]
    """Prompts of each of `rollout.sources`, or all under ""; empty where rollouts are replayed, as `eval_prompts`."""
    eval_prompts: dict[str, list[Prompt]]
    """By name, as `eval.files`."""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of all sources."""
        return [prompt for several in self.by_source.values() for prompt in several]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Sources):
    """Results of the checks of a whole run, which had to read them anyway."""

    sizes: Sizes
    plans: dict[str, Plan]
    """By which weights leave the trainers: "export" and, with engines, "publish"."""
    backends: Backends
    """The trainers' kernels, with the reason of each."""
    encoding: Encoding
    """Form in which the engines receive the weights."""
    transport: ChosenTransport
    """`publish.transport`, and why."""
    critic: Sizes | None
    """Parallel sizes of the critic, if there is one; those of the trainers where it shares their ranks."""


def check_run(config: Config) -> Prepared:
    """Check configuration against checkpoint, prompts and hooks. Raises SlimxError for the first moment at which
    something cannot work, with everything that cannot."""
    device = device_of(config)
    transport = choose_transport(config, device)
    config = transport.applied(config)
    spec = configured_model(config)
    facts = model_facts(config, spec) | {"device": device, "local_device": device}
    refuse(broken(RULES, facts))
    backends = choose_backends(
        config.trainer,
        device=device,
        packages=installed(),
        exact=config.exact,
        delta_nets=delta_net_layers(spec.transformer) > 0,
        state_spaces=bool(layers_of(spec.transformer, "M")),
        experts=spec.experts,
    )
    check_transformer(spec, config, backends, cpu=device == "cpu")
    if config.critic is not None:
        with critic_keys(config.critic):
            check_transformer(facts["critic_spec"], config.as_critic(), backends, cpu=device == "cpu")
    files = facts | weight_facts(config)
    refuse(broken(RULES, files, before=facts))
    try_hooks(config)
    sources = _sources(config, spec, device, files)
    plans, encoding = make_plans(config, spec, facts["sizes"], device)
    return Prepared(
        **{each.name: getattr(sources, each.name) for each in fields(sources)},
        sizes=facts["sizes"],
        plans=plans,
        backends=backends,
        encoding=encoding,
        transport=transport,
        critic=facts["critic_sizes"],
    )


def make_plans(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> tuple[dict[str, Plan], Encoding]:
    """The plans by which weights leave trainers of `sizes`, and the form in which engines get them."""
    plans = {"export": export_plan(config, spec, sizes)}
    published = publication_plan(config, spec, sizes, device)
    if published is None:
        return plans, "hf"
    return plans | {"publish": published.plan}, published.encoding


def check_sources(config: Config, spec: ModelSpec, device: str) -> Sources:
    """Check and read the sources of rollouts, for a command without trainers. Raises SlimxError as `check_run` does."""
    facts = config.sections | {"device": device, "local_device": device}
    refuse(broken(RULES, facts))
    return _sources(config, spec, device, facts)


def _sources(config: Config, spec: ModelSpec, device: str, facts: dict[str, Any]) -> Sources:
    """Hooks, tokenizer and prompts, with engines whose arguments SGLang takes; `facts` have been asked for."""
    hooks = NO_HOOKS if config.rollout.replay else load_hooks(config)
    for group in config.rollout.served:
        values = spec_values(config, group, group.name, device=device, moe=spec.experts > 0)
        server_args(EngineSpec(port=0, **values))
    import_transformers()
    tokenizer = run_tokenizer(config)
    refuse(broken(RULES, facts | {"tokenizer": tokenizer}, before=facts))
    by_source: dict[str, list[Prompt]] = {}
    eval_prompts: dict[str, list[Prompt]] = {}
    if not config.rollout.replay:
        by_source = training_prompts(config, tokenizer, spec)
        check_taught(config.algorithm, chain.from_iterable(by_source.values()))
        make_source(config, by_source)  # that of the user is refused now
        eval_prompts = {
            name: heldout_prompts(config, name, path, tokenizer, spec) for name, path in config.eval.files.items()
        }
    for several in (by_source, eval_prompts):
        prompts = list(chain.from_iterable(several.values()))
        if config.rollout.generate == PAIRS:
            for prompt in prompts:
                check_pair(prompt)
        check_generated(hooks.generate, prompts)
        if isinstance(hooks.reward, Mixture):
            hooks.reward.check(prompts)
        if hooks.reward is not None:
            check_answers(config.reward, hooks.reward, prompts, config.rollout.max_failed_share)
            check_prompts(hooks.reward, prompts)
    return Sources(spec=spec, hooks=hooks, tokenizer=tokenizer, by_source=by_source, eval_prompts=eval_prompts)
