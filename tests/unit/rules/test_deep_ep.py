"""DeepEP: refused before a start where it has no kernels for the model or the ranks, its buffers in the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.config.rule import all_rules, broken
from slimx.extras.planner.memory.deep_ep import (
    engine_buffers,
    low_latency_buffer,
    nvl_buffer,
    rdma_buffer,
    trainer_buffers,
)
from slimx.extras.planner.plan.report import plan_report
from slimx.layout.ranks import engine_sizes, sizes_of
from slimx.models.families import read_model
from slimx.rules.engines import has_engine_kernels
from slimx.rules.layout import has_trainer_kernels
from tests.published import published
from tests.unit.config.test_moe_configs import FILES, ROOT

GPT_OSS = ROOT / "configs/moe/gpt-oss-120b.yaml"


def broken_by(*overrides: str) -> list[tuple[str, str]]:
    config = load_config(GPT_OSS, ["trainer.moe.dispatcher=flex", *overrides])
    spec = read_model(ROOT / config.model.path)
    facts = {"trainer": config.trainer, "sizes": sizes_of(config.trainer), "spec": spec}
    return [(problem.code, problem.about) for problem in broken([has_trainer_kernels], facts)]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ((), True),
        (("trainer.expert=8", "trainer.expert_tensor=2"), True),
        (("trainer.expert=8",), False),
        (("trainer.expert=8", "trainer.expert_tensor=2", "trainer.moe.flex_backend=hybridep"), False),
        (("trainer.expert=1", "trainer.expert_tensor=null", "trainer.tensor=1"), False),  # dispatches nothing
        (("trainer.world_size=80", "trainer.pipeline=2", "trainer.expert=40"), True),
        (("trainer.world_size=12", "trainer.pipeline=1", "trainer.expert=6"), True),
    ],
)
def test_sizes_without_kernels_of_deep_ep_are_refused(overrides: tuple[str, ...], refused: bool) -> None:
    assert has_trainer_kernels in all_rules()
    assert broken_by(*overrides) == [("layout.deep_ep", "trainer.moe.dispatcher")] * refused


@pytest.mark.parametrize(
    ("tensor", "fields", "refused"),
    [
        (8, {}, False),
        (16, {}, True),
        (6, {}, True),
        (6, {"deepep_mode": "low_latency"}, False),
        (16, {"moe_a2a_backend": "none"}, False),
    ],
)
def test_servers_whose_size_deep_ep_does_not_take_are_refused(
    tensor: int, fields: dict[str, str], refused: bool
) -> None:
    assert has_engine_kernels in all_rules()
    config = load_config(GPT_OSS, [])
    (group,) = config.rollout.engines
    group = group.model_copy(update={"tensor": tensor, "sglang": {"moe_a2a_backend": "deepep", **fields}})
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engines": (group,)})})
    facts = {
        "served": changed.served,
        "spec": read_model(ROOT / config.model.path),
    }
    found = [(problem.code, problem.about) for problem in broken([has_engine_kernels], facts)]
    assert found == [("engines.deep_ep", "rollout.engines.sglang.moe_a2a_backend")] * refused


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_configurations_have_sizes_that_their_dispatcher_takes(file) -> None:
    config = load_config(file, [])
    if not (ROOT / config.model.path).exists():
        pytest.skip("the recipe's model is downloaded")
    facts = config.facts | {"sizes": sizes_of(config.trainer), "spec": read_model(ROOT / config.model.path)}
    assert broken([has_trainer_kernels, has_engine_kernels], facts) == []


def test_buffers_have_the_bytes_of_deep_eps_formulas() -> None:
    """As `Buffer.get_..._size_hint` of DeepEP computes them for DeepSeek-V3 and Kimi-K2."""
    hidden = 7168
    assert nvl_buffer(hidden, 8) == 10 * 8 * (5 * 4 + 256 * (7168 * 2 + 8 + 1024 + 512 + 512)) + 64
    assert rdma_buffer(hidden, 8) == 0
    assert nvl_buffer(hidden, 4) == 10 * 4 * (5 * 4 + 256 * 16392) + 96  # whole 128 bytes
    assert nvl_buffer(hidden, 32) == 10 * 8 * (11 * 4 + 288 * 16392) + 64
    assert rdma_buffer(hidden, 32) == 10 * 4 * (18 * 2 * 4 + 128 * 2 * 16408)
    assert rdma_buffer(hidden, 16) == 10 * 2 * (18 * 2 * 4 + 140 * 2 * 16408) + 64  # 7 chunks of 20
    assert low_latency_buffer(hidden, 384) == 2 * 384 * 128 * 2 * (224 + 14336) + 2 * 1536


def test_the_plan_counts_the_buffers_of_those_that_have_some(tmp_path: Path) -> None:
    """Plans Kimi-K2 with 4 of its layers, as buffers do not depend on their number."""
    hf = published("Kimi-K2-Instruct")
    (tmp_path / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": 4}))
    shallow = [f"model.path={tmp_path}", "trainer.pipeline=1", "trainer.layers_per_stage=null"]
    config = load_config(ROOT / "configs/moe/kimi-k2.yaml", shallow)
    spec, (group,) = read_model(ROOT / config.model.path), config.served.policy
    sizes, served = sizes_of(config.trainer), engine_sizes(group)
    trainer = trainer_buffers(config.trainer, spec, sizes, "cuda")
    assert trainer == nvl_buffer(7168, sizes.expert) + rdma_buffer(7168, sizes.expert) > 0
    assert trainer_buffers(config.trainer, spec, sizes, "cpu") == 0
    assert engine_buffers(group, spec, served) == nvl_buffer(7168, served.tensor) + low_latency_buffer(7168, 384)

    def with_mode(**fields: object) -> int:
        return engine_buffers(group.model_copy(update={"sglang": group.sglang | fields}), spec, served)

    assert with_mode(deepep_mode="low_latency") == low_latency_buffer(7168, 384)
    assert with_mode(deepep_mode="normal") == nvl_buffer(7168, served.tensor) + rdma_buffer(7168, served.tensor)
    assert with_mode(moe_a2a_backend="none") == 0
    report = plan_report(config).report
    assert {row.dispatcher for row in report.trainer_memory} == {trainer}
    assert [row.dispatcher for row in report.engine_memory] == [engine_buffers(group, spec, served)]
