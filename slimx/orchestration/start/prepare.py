"""All checks of a run that are possible before Ray, trainers or engines start, and the values that these checks
determine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from slimx.adapters.transformers import import_transformers
from slimx.algorithms.credit import load_credit
from slimx.cluster.access import check_reachable
from slimx.cluster.connection import device_of
from slimx.config.rule import refuse_broken
from slimx.config.schema import Config
from slimx.config.sections.critic import critic_keys
from slimx.config.sections.policies import ACTOR, Policy
from slimx.data.records import Prompt
from slimx.engines.server.spec import engine_spec, server_args
from slimx.json_types import Json
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, configured_model
from slimx.numerics.mode import mode_of
from slimx.orchestration.start.prompts import heldout_prompts, make_source, run_tokenizer, training_prompts
from slimx.preflight.facts import model_facts, weight_facts
from slimx.preflight.transport import ChosenTransport, choose_transport
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import export_plan, publication_plan
from slimx.rewards.mixture import Mixture
from slimx.rollout.flow.replay import NO_HOOKS
from slimx.rollout.hook_loading import Hooks, check_answers, check_generated, check_prompts, load_hooks
from slimx.trainer.device.backends import Backends, choose_backends, installed
from slimx.trainer.model.check import check_transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy that engines serve: its configuration, its model and its tokenizer."""

    config: Config
    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPolicy(ServedPolicy):
    """Everything that the checks determine about a trained policy. `config` is the policy's entry in
    `Config.by_policy`, with `publish.transport` set to the chosen transport."""

    sizes: Sizes
    plans: dict[str, Plan]
    """Plans that define how weights leave the trainers, by use: "export"; "publish" if there are engines; "adapters" if
    adapters are published without the base weights."""
    backends: Backends
    """Kernels that the trainers use, with the reason for each choice."""
    encoding: Encoding
    """Encoding of the weights that the engines receive."""
    transport: ChosenTransport
    """Transport that sends the weights to the engines, with the reason why it was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources[P: ServedPolicy]:
    """Inputs of rollouts: the policies that sample, the hooks and the prompts."""

    policies: Mapping[str, P]
    """Policies by name, the actor first."""
    hooks: Hooks
    by_source: dict[str, list[Prompt]]
    """Prompts of each source in `rollout.sources` by the source's name, or those of `rollout.prompts` under the name
    "". If rollouts are replayed, this and `eval_prompts` are empty."""
    eval_prompts: dict[str, list[Prompt]]
    """Prompts of each evaluation file by the file's name in `eval.files`."""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of all sources in one list."""
        return list(chain.from_iterable(self.by_source.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Sources[PreparedPolicy]):
    """Everything that the checks of a run determine, and the inputs that they read."""

    critic: Sizes | None
    """Parallel sizes of the critic (those of the trainers if the critic shares their ranks); None without a critic."""


def check_run(config: Config) -> Prepared:
    """Checks `config` against its model, weights, prompts and hooks. The checks run in stages: the first stage with
    problems raises SlimxError with all of that stage's problems."""
    check_reachable(config.cluster.ray_address)
    device = device_of(config)
    checked = {}
    for name, view in config.by_policy.items():
        checked[name] = _check_model(view, device, config.policies)
    actor = checked[ACTOR]
    sources = _sources(actor.config, actor.facts["spec"], device, actor.facts)
    policies: dict[str, PreparedPolicy] = {}
    for name, policy in checked.items():
        tokenizer = sources.policies[ACTOR].tokenizer if name == ACTOR else _tokenizer(policy, device)
        policies[name] = _policy(policy, device, tokenizer)
    return Prepared(
        policies=policies,
        hooks=sources.hooks,
        by_source=sources.by_source,
        eval_prompts=sources.eval_prompts,
        critic=actor.facts["critic_sizes"],
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """A policy whose model, parallel sizes and weights fit together, and the facts (values derived from the
    configuration, the model and the machine) against which the rules of the configuration were checked."""

    config: Config
    transport: ChosenTransport
    backends: Backends
    facts: Json


def _check_model(config: Config, device: str, policies: Mapping[str, Policy]) -> _Checked:
    """Checks the configuration of one policy against the policy's model and weights. `policies`: section `policies` of
    the run's configuration."""
    transport = choose_transport(config, device)
    config = transport.applied(config)
    spec = configured_model(config)
    # Section policies is empty in the configuration of a single policy.
    facts = model_facts(config, spec) | {"device": device, "local_device": device, "policies": policies}
    refuse_broken(facts, config.facts)
    backends = choose_backends(
        config.trainer,
        device=device,
        packages=installed(),
        replaced=mode_of(config).replaces_layers,
        layer_kind=spec.layer_kind,
        experts=spec.experts,
    )
    check_transformer(spec, config, backends, cpu=device == "cpu")
    if config.critic is not None:
        with critic_keys(config.critic):
            check_transformer(facts["critic_spec"], config.as_critic(), backends, cpu=device == "cpu")
    files = facts | weight_facts(config)
    refuse_broken(files, facts)
    return _Checked(config, transport, backends, files)


def _policy(checked: _Checked, device: str, tokenizer: PreTrainedTokenizerBase) -> PreparedPolicy:
    spec = checked.facts["spec"]
    sizes = checked.facts["sizes"]
    plans, encoding = make_plans(checked.config, spec, sizes, device)
    return PreparedPolicy(
        config=checked.config,
        spec=spec,
        tokenizer=tokenizer,
        sizes=sizes,
        plans=plans,
        backends=checked.backends,
        encoding=encoding,
        transport=checked.transport,
    )


def _tokenizer(checked: _Checked, device: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a policy other than the actor, and checks the server arguments of its engines."""
    config = checked.config
    facts = checked.facts
    _check_engines(config, facts["spec"], device)
    tokenizer = run_tokenizer(config)
    refuse_broken(facts | {"tokenizer": tokenizer}, facts)
    return tokenizer


def make_plans(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> tuple[dict[str, Plan], Encoding]:
    """Returns the export and publication plans for trainers with the parallel sizes `sizes`, and the encoding of the
    weights that engines receive."""
    plans = {"export": export_plan(config, spec, sizes)}
    published = publication_plan(config, spec, sizes, device)
    if published is None:
        return plans, "hf"
    plans["publish"] = published.plan
    if published.adapters is not None:
        plans["adapters"] = published.adapters
    return plans, published.encoding


def check_sources(config: Config, spec: ModelSpec, device: str) -> Sources:
    """Checks and reads the inputs of rollouts for a command without trainers, which `check_parts` has checked. Raises
    SlimxError with the problems that it finds."""
    facts = config.facts | {"device": device, "local_device": device}
    refuse_broken(facts, config.facts)
    return _sources(config, spec, device, facts)


def _sources(config: Config, spec: ModelSpec, device: str, facts: Json) -> Sources:
    """Reads the hooks, the tokenizer and the prompts, and checks the engines' server arguments. `facts`: facts (values
    derived from the configuration, the model and the machine) against which the rules of the configuration have been
    checked."""
    hooks = NO_HOOKS if config.rollout.replay else load_hooks(config)
    load_credit(config.algorithm.credit)
    _check_engines(config, spec, device)
    import_transformers()
    tokenizer = run_tokenizer(config)
    known = facts | {"tokenizer": tokenizer}
    refuse_broken(known, facts)
    by_source: dict[str, list[Prompt]] = {}
    eval_prompts: dict[str, list[Prompt]] = {}
    if not config.rollout.replay:
        by_source = training_prompts(config, tokenizer, spec)
        prompts = list(chain.from_iterable(by_source.values()))
        refuse_broken(known | {"prompts": prompts}, known)
        make_source(config, by_source)  # raises SlimxError if a user's source cannot be created
        for name, path in config.eval.files.items():
            eval_prompts[name] = heldout_prompts(config, name, path, tokenizer, spec)
    for by_name in (by_source, eval_prompts):
        prompts = list(chain.from_iterable(by_name.values()))
        check_generated(hooks.generate, prompts, tokenizer)
        if isinstance(hooks.reward, Mixture):
            hooks.reward.check(prompts)
        if hooks.reward is not None:
            check_answers(config.reward, hooks.reward, prompts, config.rollout.max_failed_share)
            check_prompts(hooks.reward, prompts)
    policies = {ACTOR: ServedPolicy(config=config, spec=spec, tokenizer=tokenizer)}
    return Sources(policies=policies, hooks=hooks, by_source=by_source, eval_prompts=eval_prompts)


def _check_engines(config: Config, spec: ModelSpec, device: str) -> None:
    """Raises SlimxError if SGLang does not accept a server argument of an engine group."""
    for group in config.served.groups:
        server_args(engine_spec(config, group, group.name, device=device, moe=spec.experts > 0), f"{group.key}.sglang")
