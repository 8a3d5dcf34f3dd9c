"""The flex dispatcher is refused before a start where DeepEP has no kernels for the model or the ranks."""

from __future__ import annotations

import pytest

from slimx.config import load_config
from slimx.config.rule import broken
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.preflight.checks import RULES
from slimx.preflight.checks.layout import dispatches
from tests.unit.config.test_moe_configs import FILES, ROOT

GPT_OSS = ROOT / "configs/moe/gpt-oss-120b.yaml"


def broken_by(*overrides: str) -> list[tuple[str, str]]:
    config = load_config(GPT_OSS, ["trainer.moe.dispatcher=flex", *overrides])
    spec = read_model(ROOT / config.model.path)
    facts = {"trainer": config.trainer, "sizes": sizes_of(config.trainer), "spec": spec}
    return [(problem.code, problem.about) for problem in broken([dispatches], facts)]


@pytest.mark.parametrize(
    ("overrides", "about"),
    [
        ((), "trainer.moe.dispatcher"),
        (("trainer.expert=8", "trainer.expert_tensor=2"), "trainer.moe.dispatcher"),
        (("trainer.expert=8",), None),
        (("trainer.expert=8", "trainer.expert_tensor=2", "trainer.moe.flex_backend=hybridep"), None),
        (("trainer.expert=1", "trainer.expert_tensor=null", "trainer.tensor=1"), None),  # dispatches nothing
        (("trainer.world_size=80", "trainer.pipeline=2", "trainer.expert=40"), "trainer.expert"),
        (("trainer.world_size=12", "trainer.pipeline=1", "trainer.expert=6"), "trainer.expert"),
    ],
)
def test_sizes_without_kernels_of_deep_ep_are_refused(overrides: tuple[str, ...], about: str | None) -> None:
    assert dispatches in RULES
    assert broken_by(*overrides) == ([("layout.deep_ep", about)] if about else [])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_configurations_have_sizes_that_their_dispatcher_takes(file) -> None:
    config = load_config(file, [])
    if not (ROOT / config.model.path).exists():
        pytest.skip("the recipe's model is downloaded")
    facts = {"trainer": config.trainer, "sizes": sizes_of(config.trainer), "spec": read_model(ROOT / config.model.path)}
    assert broken([dispatches], facts) == []
