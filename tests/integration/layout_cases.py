"""The trainer layouts of test_invariance, as a covering array: every pair of settings that can meet does."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from slimx.config.sections.trainer import Trainer

LAYERS = 4
EXPERTS = 8
FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "virtual_pipeline": (1, 2),
    "layers_per_stage": (None, (1, 3)),
    "context": (1, 2),
    "data": (1, 2),
    "expert": (1, 2, 4),
    "expert_tensor": (1, 2),
    "recompute": ("none", "selective", "full"),
    "max_tokens_per_microbatch": (56, 200),
}
Case = dict[str, Any]

ONE = {name: values[0] for name, values in FACTORS.items()} | {"world_size": 1}
"""The case that the others are compared with."""
_KEYS = (*FACTORS,)


def _case(*values: Any) -> Case:
    case = dict(zip(_KEYS, values, strict=True))
    return case | {"world_size": case["tensor"] * case["pipeline"] * case["context"] * case["data"]}


COVERING: tuple[Case, ...] = (
    _case(1, 1, 1, None, 1, 1, 1, 1, "selective", 200),
    _case(2, 2, 2, None, 1, 1, 1, 2, "none", 56),
    _case(1, 1, 1, None, 2, 2, 2, 2, "full", 56),
    _case(1, 2, 1, (1, 3), 1, 2, 2, 1, "none", 200),
    _case(2, 1, 1, None, 2, 1, 4, 1, "full", 200),
    _case(1, 2, 2, None, 2, 1, 2, 1, "selective", 56),
    _case(2, 2, 1, (1, 3), 1, 1, 1, 2, "full", 200),
    _case(2, 1, 1, None, 1, 2, 4, 1, "selective", 56),
    _case(1, 2, 1, (1, 3), 2, 1, 1, 1, "selective", 56),
    _case(1, 2, 2, None, 1, 2, 1, 1, "full", 200),
    _case(1, 1, 1, None, 2, 2, 4, 1, "none", 56),
    _case(2, 1, 1, None, 2, 1, 2, 2, "selective", 200),
)
"""Every pair of settings of layouts of up to four ranks."""
MODELS = ("qwen", "deepseek")
QUICK = (COVERING[0], COVERING[5], COVERING[6], COVERING[10])
"""The one of one rank, and three of four ranks in which every setting occurs."""

EIGHT = _case(2, 2, 2, None, 2, 1, 4, 1, "selective", 200)


def fields(case: Case) -> dict[str, Any]:
    """The trainer section of a case."""
    modules = ["core_attn", "layernorm", "moe_act"] if case["recompute"] == "selective" else ["core_attn"]
    return case | {"recompute": {"granularity": case["recompute"], "modules": modules}}


def possible(case: Case) -> bool:
    """Returns True if slimx takes the layout for the two models of the test."""
    stages = case["pipeline"] * case["virtual_pipeline"]
    if case["virtual_pipeline"] > 1 and case["pipeline"] == 1:
        return False
    if case["layers_per_stage"] and len(case["layers_per_stage"]) != stages:
        return False
    try:
        Trainer.model_validate(fields(case))
    except ValidationError:
        return False
    return True


def all_cases(largest: int) -> list[Case]:
    """Every possible layout of up to `largest` ranks."""
    cases = [_case(*values) for values in product(*FACTORS.values())]
    return [case for case in cases if case["world_size"] <= largest and possible(case)]


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of settings that meet in a case."""
    return set(combinations([(name, case[name]) for name in _KEYS], 2))


def name_of(case: Case) -> str:
    """Such as TP2xPP2xVPP2xEP2-full."""
    short = {
        "tensor": "TP",
        "pipeline": "PP",
        "virtual_pipeline": "VPP",
        "context": "CP",
        "data": "DP",
        "expert": "EP",
        "expert_tensor": "ETP",
    }
    sizes = [f"{text}{case[name]}" for name, text in short.items() if case[name] > 1] or ["single"]
    split = ["uneven"] if case["layers_per_stage"] else []
    return "-".join(["x".join(sizes), *split, case["recompute"], str(case["max_tokens_per_microbatch"])])
