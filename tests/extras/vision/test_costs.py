"""Plans count the FLOPs that torch counts in transformers' towers, and memory that grows with images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.extras.planner.memory.engine import engine_memory, image_memory
from slimx.extras.planner.memory.trainer import activation_setting, trainer_memory
from slimx.extras.planner.plan.cost_model import update_cost
from slimx.extras.vision.costs import TowerCosts
from slimx.extras.vision.family import TowerKind
from slimx.extras.vision.layer_kinds import WithTower
from slimx.extras.vision.model import build_tower
from slimx.extras.vision.tower import Tower
from slimx.extras.vision.towers import kimi_k25, qwen3_vl
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec, configured_model, read_model
from slimx.preflight.hardware import machine_of
from tests.published import published
from tests.towers import TOWER

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs/moe/qwen3-vl-30b-a3b.yaml"
VISION = TOWER | {"deepstack_visual_indexes": [0, 2]}
MOONVIT = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "positions": (6, 6),
}
GRID = (1, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of tower."""

    fields: dict[str, Any]
    kind: TowerKind
    tower: Tower
    patch: tuple[int, ...]
    """Shape of a patch."""
    trained: tuple[str, ...]
    """Prefixes of the names of the projector's parameters in the module."""


CASES = {
    "Qwen3-VL": Case(
        fields=VISION,
        kind=qwen3_vl,
        tower=Tower(
            module=f"{Qwen3VLVisionModel.__module__}:Qwen3VLVisionModel", fields=VISION, merge=2, axes=None, levels=2
        ),
        patch=(3 * 2 * 4 * 4,),
        trained=("merger.", "deepstack_merger_list."),
    ),
    "Kimi-K2.5": Case(
        fields=MOONVIT,
        kind=kimi_k25,
        tower=Tower(
            module="slimx.extras.vision.moonvit:KimiTower",
            fields={
                "vision_config": {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "patch_size": 4,
                    "pos_emb_height": 6,
                    "pos_emb_width": 6,
                },
                "text_config": {"hidden_size": 64},
                "projection_hidden_size": 32,
            },
            merge=2,
            axes=None,
        ),
        patch=(3, 4, 4),
        trained=("mm_projector.",),
    ),
}


def costs(case: Case, train: str, images: int) -> TowerCosts:
    return TowerCosts(
        vision=case.fields,
        rows=case.kind.rows(case.fields),
        projector=case.kind.PROJECTOR,
        levels=case.tower.levels,
        train=train,
        hidden=64,
        prompt=images * 12,
        prompts=1,
        image=48,
    )


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_flops_of_a_tower_are_those_that_torch_counts(name: str, images: int) -> None:
    case = CASES[name]
    model = build_tower(case.tower)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.set_attn_implementation("eager")  # the counter does not know torch's kernel for CPUs
    pixels = torch.randn(images * 48, *case.patch)

    def counted(*, backward: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            out = model(pixels, grid_thw=torch.tensor([GRID] * images))
            if backward:
                features = out.deepstack_features if case.tower.levels else ()
                sum(part.sum() for part in (out.pooler_output, *features)).backward()
        return counter.get_total_flops()

    assert costs(case, "none", images).rollout_flops() == pytest.approx(counted(backward=False), rel=1e-9)
    # Nothing is propagated to the pixels.
    pixel_gradients = 2 * images * 48 * prod(case.patch) * 32
    assert costs(case, "tower", images).rollout_flops() == pytest.approx(
        counted(backward=True) + pixel_gradients, rel=1e-9
    )
    for name_in_module, parameter in model.named_parameters():
        parameter.requires_grad_(name_in_module.startswith(case.trained))
    assert costs(case, "projector", images).rollout_flops() == pytest.approx(counted(backward=True), rel=1e-9)


def planned(*overrides: str) -> tuple[Config, ModelSpec]:
    config = load_config(FILE, list(overrides))
    return config, configured_model(config)


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_root")
def test_more_of_a_tower_trained_needs_more_memory() -> None:
    records = {}
    for train in ("none", "projector", "tower"):
        config, spec = planned(f"trainer.vision.train={train}", "trainer.max_tokens_per_microbatch=4096")
        (records[train],) = trainer_memory(config, spec, sizes_of(config.trainer), "cuda")
    frozen, projector, tower = records.values()
    assert frozen.activations < projector.activations < tower.activations
    assert frozen.gradients < projector.gradients < tower.gradients
    assert frozen.parameters == projector.parameters == tower.parameters
    config, _ = planned("trainer.vision=null", "trainer.max_tokens_per_microbatch=4096")
    (text,) = trainer_memory(config, read_model(config.model.path), sizes_of(config.trainer), "cuda")
    assert text.parameters == frozen.parameters and text.gradients == frozen.gradients
    assert text.activations < frozen.activations


@pytest.mark.usefixtures("in_root")
def test_images_of_a_micro_batch_are_no_more_than_those_of_all_prompts() -> None:
    config, spec = planned("rollout.max_prompt_tokens=100", "rollout.prompts_per_step=2")
    assert isinstance(spec.layer_kind, WithTower) and spec.layer_kind.inputs is not None
    setting = activation_setting(config, spec, sizes_of(config.trainer), "cuda")
    few = spec.layer_kind.inputs.costs
    unknown = replace(few, prompt=None)
    same = replace(few, prompt=setting.tokens, prompts=1)
    assert few.work_bytes(setting) < unknown.work_bytes(setting) == same.work_bytes(setting)


@pytest.mark.usefixtures("in_root")
def test_larger_images_cost_more_time() -> None:
    times = []
    for pixels in (65536, 262144):
        config, spec = planned(f"trainer.vision.max_pixels={pixels}")
        sizes = sizes_of(config.trainer)
        times.append(update_cost(config, spec, sizes, machine_of(config.cluster), exchanged=0).compute)
    config, _ = planned("trainer.vision=null")
    spec = read_model(config.model.path)
    text = update_cost(config, spec, sizes, machine_of(config.cluster), exchanged=0).compute
    assert text < times[0] < times[1]


@pytest.mark.usefixtures("in_root")
@pytest.mark.parametrize(
    ("gpu", "engine", "mib"),
    [
        ("h100", {}, 1024),
        ("h100", {"sglang": {"max_running_requests": 400}}, 3072),
        ("h100", {"nodes": 2, "tensor": 16}, 100),
        ("gb300", {}, 100),
    ],
)
def test_engines_reserve_memory_for_images(gpu: str, engine: dict[str, object], mib: int) -> None:
    config, spec = planned()
    (group,) = config.served.policy
    machine = machine_of(config.cluster.model_copy(update={"gpu": gpu}))
    found, factor = image_memory(spec.hf, group.model_copy(update=engine), machine)
    assert found == mib * 2**20
    assert factor == pytest.approx(0.95 * (1 - 0.1 * ((1152 / 1024) ** 2 - 1)))
    assert image_memory({"architectures": ["Qwen3MoeForCausalLM"]}, group, machine) == (0, 1.0)
    nbytes, factor = image_memory(published("Kimi-K2.5"), group, machine)
    assert nbytes == 100 * 2**20
    assert factor == pytest.approx(0.95 * (1 - 0.1 * (27 / 24 * (1152 / 1024) ** 2 - 1)))


@pytest.mark.usefixtures("in_root")
def test_reserved_memory_leaves_less_room_for_keys_and_values() -> None:
    config, spec = planned()
    (group,) = config.served.policy
    record = engine_memory(config, spec, group, machine_of(config.cluster), staged=0)
    assert record.images == 2**30
    assert record.kv_room == record.static - record.weights - record.images
    chosen = group.model_copy(update={"sglang": {}})
    own = engine_memory(config, spec, chosen, machine_of(config.cluster), staged=0)
    decode = engine_memory(
        config, spec, chosen.model_copy(update={"role": "decode"}), machine_of(config.cluster), staged=0
    )
    assert own.static_fraction == pytest.approx(decode.static_fraction * own.vision_factor)
