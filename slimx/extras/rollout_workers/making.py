"""The `GroupMaker` of a rollout worker, built from the configuration and the addresses of the run's engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

from slimx.adapters.transformers import import_transformers
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.config.sections.rollout import Proxy
from slimx.engines.outage import Outage, Outages
from slimx.extras.rollout_workers.messages import Setup
from slimx.extras.served_models.teacher import make_scorer
from slimx.models.families import configured_model
from slimx.orchestration.start.prompts import run_tokenizer
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.policy import PolicyClient, make_agent_server, policy_client


async def make_maker(
    config: Config,
    setup: Setup,
    outages: Mapping[str, Outage],
    lost: Callable[[str], Awaitable[None]],
    stack: AsyncExitStack,
) -> GroupMaker:
    """Loads the hooks and the tokenizers and opens the clients, which `stack` closes. `outages`: outage of each
    policy's engines. `lost`: awaited with the policy's name before a request is sent again that was lost with its
    engine."""
    import_transformers()
    policies: dict[str, PolicyClient] = {}
    for name, view in config.by_policy.items():
        endpoint = setup.endpoints.get(name)
        client = None
        if endpoint is not None:
            client = endpoint.client(config.rollout, partial(lost, name), outages[name])
            await stack.enter_async_context(client)
        policies[name] = policy_client(view, configured_model(view), run_tokenizer(view), client, stack)
    proxy = make_agent_server(Proxy(), setup.context)  # each worker has a port of its own
    stack.push_async_callback(proxy.stop)
    actor = config.by_policy[ACTOR]
    return GroupMaker(
        _share(actor, setup),
        load_hooks(actor),
        policies,
        setup.frozen,
        proxy,
        Outages(tuple(outages.values())),
        score=make_scorer(actor, setup.frozen) if setup.frozen else None,
    )


def _share(config: Config, setup: Setup) -> Config:
    """Returns the configuration with the worker's share of the requests and rollouts in flight."""
    limits = {"concurrency": setup.concurrency, "max_rollouts": setup.max_rollouts}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=limits)})
