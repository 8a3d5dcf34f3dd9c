"""A config.json with values that no model has is refused by field, and a plan of any other one has an answer."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.extras.planner.plan.report import plan_report
from slimx.models.families import read_model
from slimx.models.fields import WITHOUT_MEANING
from slimx.models.schema import FIELDS
from tests.extras.planner.odd_values import NOT_NUMBERS, NUMBERS, ROOT, STRINGS, STRUCTURES, too_long
from tests.refusals import numbers, refused

PUBLISHED = {
    folder.name: json.loads((folder / "config.json").read_text())
    for folder in sorted((ROOT / "configs" / "moe" / "models").iterdir())
}
CUT = {
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "MEM*",
}
"""Values of fields with which a published model has few layers, and its plan takes a fraction of a second."""
VALUES = [*NUMBERS, *NOT_NUMBERS, *STRINGS, *(structure for structure in STRUCTURES if structure != {1: 2})]
Place = tuple[str, ...]


def small(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        key: small(value) if isinstance(value, dict) else CUT.get(key, value[:4] if key == "layer_types" else value)
        for key, value in copy.deepcopy(hf).items()
    }


def places(hf: dict[str, Any], at: Place = ()) -> Iterator[Place]:
    """Returns the paths of fields in a config.json, including those of nested objects."""
    for key, value in hf.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


def inside(hf: dict[str, Any], place: Place) -> Any:
    for key in place:
        hf = hf[key]
    return hf


def mutated(seed: int) -> tuple[dict[str, Any], str]:
    """Makes a small model with one or two fields changed, exchanged or left out, and a description of the change."""
    draw = random.Random(seed)
    name = [*PUBLISHED][seed % len(PUBLISHED)]
    hf, done = small(PUBLISHED[name]), name
    for _ in range(draw.randint(1, 2)):
        place = draw.choice([*places(hf)])
        fields, value = inside(hf, place[:-1]), inside(hf, place)
        changes = [
            draw.choice(VALUES),
            draw.choice(VALUES),
            [value],
            str(value),
            inside(hf, draw.choice([*places(hf)])),
        ]
        if type(value) in (int, float):
            changes += [-value, value + 1, value * 7, float(value)]
        change = draw.choice(changes)
        done += f", {'.'.join(place)}: {change!r:.80}"
        fields[place[-1]] = copy.deepcopy(change)
        if draw.random() < 0.1:
            del fields[place[-1]]
    return hf, done


def planned(directory: Path, hf: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(hf))
    values = {"run": {"dir": "x"}, "model": {"path": str(directory)}, "rollout": {"prompts": "p"}}
    plan_report(Config.model_validate(values))


@pytest.mark.timeout(1800)  # for hangs: it takes a few seconds
@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow("200 models"))])
def test_models_that_do_not_exist_are_answered(tmp_path: Path, count: int):
    problems = []
    for seed in range(count):
        hf, done = mutated(seed)
        began = time.process_time()
        try:
            planned(tmp_path, hf)
        except SlimxError as refusal:
            if "\n" in str(refusal):
                problems.append(f"{done}: {refusal}")
        except Exception as error:  # a traceback, whatever it is of
            problems.append(f"{done}: {error!r}")
        if too_long(seconds := time.process_time() - began):
            problems.append(f"{done}: {seconds:.1f} s")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_of_another_type_is_refused_by_name(tmp_path: Path, name: str):
    """Changes every field except those without any meaning, whether it has a type or a single valid value."""
    checked = 0
    for place in places(PUBLISHED[name]):
        field = ".".join(place)
        if place[-1] in WITHOUT_MEANING or place[0] == "vision_config" or len(place) > 2:
            continue
        hf = small(PUBLISHED[name])
        inside(hf, place[:-1])[place[-1]] = [{"a": [field]}]
        (tmp_path / "config.json").write_text(json.dumps(hf))
        try:
            read_model(tmp_path)
        except SlimxError as refusal:
            assert refusal.about == field and str(tmp_path) in str(refusal), refusal
            checked += 1
        else:
            assert place[-1] not in FIELDS, field
    assert checked > 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_experts_per_tok", value) for value in (0, 200, False)),
        *(("rms_norm_eps", value) for value in (-1, False, [1e-6], float("nan"))),
        *(("rope_theta", value) for value in (0, "1e6", float("inf"), 10**400)),
        *(("norm_topk_prob", value) for value in ("nan", None)),
        *(("head_dim", value) for value in (127, 256 * 10**9)),
        *(("max_position_embeddings", value) for value in ("40960", [40960], 1e300)),
        ("num_hidden_layers", 151643),
        ("num_attention_heads", 31),
        ("attention_bias", 0),
        ("partial_rotary_factor", 1.5),
        ("rope_parameters", []),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_name(tmp_path: Path, field: str, value: Any):
    with refused("model.field", about=field) as error:
        planned(tmp_path, PUBLISHED["Qwen3-30B-A3B"] | {field: value})
    assert str(tmp_path / "config.json") in str(error.value)


def test_an_engine_without_a_layer_of_attention_is_refused(tmp_path: Path):
    hf = PUBLISHED["Qwen3-Next-80B-A3B-Instruct"] | {"num_hidden_layers": 3}
    with refused("model.served_field", about="full_attention_interval"):
        planned(tmp_path, hf)


def test_more_experts_than_a_plan_can_take_are_refused(tmp_path: Path):
    with refused("model.field") as error:
        planned(tmp_path, PUBLISHED["Qwen3-30B-A3B"] | {"num_experts": 2000})
    assert {48, 2000, 2 * 48 * 2000} <= {*numbers(error.value)}
