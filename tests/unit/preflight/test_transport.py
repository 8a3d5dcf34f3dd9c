"""`publish.transport: auto` stands for one transport that reaches every engine, the same in the plan and in the run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.preflight.transport import choose_transport

HERE, FAR = {"urls": ["http://127.0.0.1:8000"]}, {"urls": ["http://gpu7:8000"]}
SPANNING = {"tensor": 16, "nodes": 2}
BUCKET = {"publish.staging": "bucket"}


def config_of(**keys: Any) -> Config:
    values: dict[str, Any] = {"run": {"dir": "run"}, "model": {"path": "model"}, "rollout": {"prompts": "none"}}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("keys", "cpu", "cuda"),
    [
        ({}, "memory", "memory"),
        (BUCKET, "memory", "cuda_ipc"),
        (BUCKET | {"cluster.nodes": 1, "cluster.ray_address": "auto"}, "memory", "cuda_ipc"),
        (BUCKET | {"cluster.ray_address": "auto"}, "nixl", "nixl"),
        (BUCKET | {"cluster.nodes": 2}, "nixl", "nixl"),
        (BUCKET | {"cluster.nodes": 2, "schedule.colocate": True}, "nixl", "nixl"),
        ({"cluster.nodes": 2}, "nixl", "nixl"),
        # Sizes of nodes say how many a run on GPUs takes.
        (BUCKET | {"cluster.gpu": "h100", "trainer.world_size": 7}, "memory", "cuda_ipc"),
        (BUCKET | {"cluster.gpu": "h100", "trainer.world_size": 8}, "memory", "nixl"),
        (BUCKET | {"cluster.gpu": "h100", "trainer.world_size": 8, "schedule.colocate": True}, "memory", "cuda_ipc"),
        (BUCKET | {"cluster.gpus_per_node": 4, "trainer.world_size": 4}, "memory", "nixl"),
        (BUCKET | {"rollout.engines": [SPANNING]}, "nixl", "nixl"),
        (BUCKET | {"rollout.engines": [{"name": "a", **SPANNING}, {"name": "b", "tensor": 16}]}, "nixl", "nixl"),
        ({"rollout.engines": [HERE]}, "memory", "memory"),
        ({"rollout.engines": [FAR]}, "disk", "disk"),
        ({"rollout.engines": [{"name": "a", **HERE}, {"name": "b", **FAR}]}, "disk", "disk"),
        ({"rollout.engines": [HERE], "cluster.nodes": 2}, "disk", "disk"),
        ({"rollout.engines": [HERE], "cluster.ray_address": "auto"}, "disk", "disk"),
        ({"rollout.engines": [], "rollout.replay": "RUN", "cluster.nodes": 4}, "memory", "memory"),
    ],
)
def test_auto_is_a_transport_that_reaches_every_engine(keys: dict[str, Any], cpu: str, cuda: str) -> None:
    config = config_of(**keys)
    for device, name in (("cpu", cpu), ("cuda", cuda)):
        chosen = choose_transport(config, device)
        assert chosen.name == name and chosen.why and "\n" not in chosen.why
        applied = chosen.applied(config)
        assert applied.publish.transport == name and config.publish.transport == "auto"
        assert choose_transport(applied, device).name == name, "what is chosen is not chosen anew"


def test_the_chosen_transport_breaks_no_rule() -> None:
    rules = [rule for rule in all_rules() if rule.about == "publish.transport"]
    assert len(rules) >= 7
    cases = product(
        ({}, {"cluster.nodes": 4}, {"cluster.gpu": "h100"}, {"cluster.ray_address": "auto"}),
        ({}, {"schedule.colocate": True}),
        ({}, BUCKET),
        ([{}], [{"tensor": 2, "count": 2}], [SPANNING], [HERE], [FAR]),
        (1, 32),
        ("cpu", "cuda"),
    )
    tried = 0
    for cluster, schedule, staging, engines, world, device in cases:
        if schedule and "urls" in engines[0]:
            continue  # refused whatever the transport
        sizes = {"rollout.engines": engines, "trainer.world_size": world}
        config = config_of(**cluster, **schedule, **staging, **sizes)
        chosen = choose_transport(config, device).applied(config)
        assert broken(rules, chosen.facts | {"device": device}) == [], chosen.publish
        tried += 1
    assert tried == 4 * (2 * 3 + 2) * 2 * 2 * 2


@pytest.mark.parametrize("transport", ["memory", "cuda_ipc"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_machines_of_unknown_size_are_refused_to_what_reaches_one(transport: str, device: str) -> None:
    config = config_of(**{"publish.transport": transport, "cluster.nodes": 4})
    (problem,) = broken(all_rules(), config.facts | {"device": device})
    assert (problem.code, problem.about) == ("publish.machines", "publish.transport")
