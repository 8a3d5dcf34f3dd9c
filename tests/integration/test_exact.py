"""Exact mode: log-probs of the real server and of the real trainer are equal to the last bit, token by token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.layout.ranks import EngineSizes
from tests.integration import exact_server
from tests.integration.block_models import make_block_model
from tests.integration.conftest import ROOT
from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.engine_families import make_model
from tests.integration.exact_runs import DENSE, ONE, TWO, assert_none, gaps
from tests.integration.random_adapters import LORA, make_adapters
from tests.integration.runs import TrainProcess, steps, write_config
from tests.refusals import numbers

pytestmark = pytest.mark.integration

THREE_LAYERS = {"layers_per_stage": (1, 2)}
"""Of the two stages, in models that have three layers; the quickstart's has two."""
FOUR: list[dict[str, Any]] = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "expert": 4, "expert_tensor": 1},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 1},
    {"pipeline": 2, "context": 2},
    {"expert": 4},
]
SPOILT = ["weights", "rms_norm", "linear", "silu_and_mul", "attention", "attention order"]


@pytest.mark.slow("a whole run; test_run_deepseek has one in exact mode")
def test_quickstart_runs_in_exact_mode_without_any_gap(tiny_model: Path, task_of_sums: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact"},
        # The pass over the old policy, which an exact run leaves out.
        algorithm={"old_logprobs": "recompute"},
        schedule={"steps": 3},
        checkpoint={"export_hf": False},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] == 0.0 and row["mismatch/max"] == 0.0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1


@pytest.mark.slow("a trainer and a server in each mode")
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_doctor_says_how_large_the_gap_is_and_where_it_begins(
    mode: str, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_model, task_of_sums / "train.jsonl", numerics={"mode": mode})
    command = [sys.executable, "-m", "slimx.cli", "doctor", str(config), "--gap", "--layers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    gap = float(re.search(r"largest (\S+)", done.stdout)[1])
    if mode == "exact":
        assert gap == 0.0 and "first difference" not in done.stdout
    else:
        (line,) = (line for line in done.stdout.splitlines() if "first difference" in line)
        assert 0 < gap < 1e-4 and numbers(line), "tokens that differ"


def cases_of(name: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rank first; all with two leaves unless they say otherwise."""
    out = [{"leaves": 2, **case} for case in [ONE, *cases]]
    return (
        out
        if name in ("moe", "blocks")
        else [
            {**case, "trainer": case["trainer"] | (THREE_LAYERS if "pipeline" in case["trainer"] else {})}
            for case in out
        ]
    )


def sequences(count: int = 24) -> list[dict[str, Any]]:
    random = np.random.default_rng(3)
    lengths = [(int(random.integers(2, 30)), int(random.integers(1, 12))) for _ in range(count)]
    tokens = [[random.integers(4, 100, n).tolist() for n in pair] for pair in lengths]
    return [
        {"prompt": prompt, "tokens": sampled, "temperature": (1.0, 0.7)[number % 2]}
        for number, (prompt, sampled) in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """Directories by family."""
    out = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen2", "llama", "glm4_moe"):
        make_model(name, out / name)
    make_deepseek(out / "deepseek")
    make_deepseek(out / "direct", q_lora_rank=None)  # no latents of queries, as in Moonlight
    make_block_model(out / "blocks")
    return {"moe": tiny_model} | {path.name: path for path in out.iterdir()}


@pytest.mark.costly("ranks of every layout, in two types")
def test_trainers_of_every_layout_agree_bit_for_bit(models: dict[str, Path], tmp_path: Path) -> None:
    def group(name: str, dtype: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
        cases = cases_of(name, cases)
        return {"model": str(models[name]), "dtype": dtype, "completions": completions, "cases": cases}

    completions = sequences(12)
    spoilt = [{**ONE, "spoil": what} for what in SPOILT]

    def trained(case: dict[str, Any]) -> dict[str, Any]:
        return {**case, "gradients": "exact" if case["trainer"].get("world_size", 1) > 1 else "fast"}

    groups = [
        group("moe", "bfloat16", TWO),
        group("moe", "float32", [*TWO, {**ONE, "leaves": 4}, *spoilt]),  # rounding to bfloat16 would hide some
        group("qwen2", "bfloat16", DENSE),  # biases, tied embeddings
        group("deepseek", "float32", TWO),  # latent attention, sigmoid router with bias and groups, shared experts
    ]
    # As engines hold them in fp8: two layouts, and a trainer that does not round.
    rounded = [TWO[0], TWO[2], {**ONE, "follows": True}, {**ONE, "quantize": None, "spoil": "none"}]
    groups.append(group("blocks", "bfloat16", rounded) | {"quantize": "ieee"})
    # Weights merged with adapters in a checkpoint, and adapters that stand beside the weights in every layout.
    adapters, merged = make_adapters(models["moe"], tmp_path / "adapters", torch.bfloat16)
    beside = {"distributed_optimizer": True, "lora": LORA | {"load": str(adapters)}}
    cases = [{"trainer": case["trainer"] | beside} for case in TWO]
    bare = {**ONE, "leaves": 2, "spoil": "adapters left out"}
    groups.append(group("moe", "bfloat16", [*cases, bare]))
    groups[-1]["cases"][0]["model"] = str(merged)
    for each in groups:
        if each["dtype"] == "float32":
            each["cases"][: 1 + len(TWO)] = [trained(case) for case in each["cases"][: 1 + len(TWO)]]
    found = gaps(tmp_path / "ranks", groups)
    tokens = sum(len(one["tokens"]) for one in completions)
    for group_of, (_, *metrics) in zip(groups, found, strict=True):
        for case, metric in zip(group_of["cases"][1:], metrics, strict=True):
            assert metric["gap/tokens"] == tokens, case
            wanted = "spoil" in case or case["leaves"] != 2
            assert (metric["gap/max"] > 0) == wanted, (group_of["model"], case, metric["gap/max"])
            if "follows" in case:
                assert all(metric[occasion] for occasion in ("others", "back", "step", "restored")), metric
    for number, group_of in enumerate(groups):
        oracle, *others = [n for n, case in enumerate(group_of["cases"]) if "gradients" in case] or [None]
        for other in others:
            same_gradients(*(tmp_path / "ranks" / f"{number}-{n}.safetensors" for n in (oracle, other)))
            stock, exact = (checkpoint_keys(tmp_path / "ranks", f"{number}-{n}") for n in (oracle, other))
            assert stock == exact


@pytest.mark.slow("four ranks in two layouts")
def test_trainers_of_four_ranks_agree_to_the_last_bit(models: dict[str, Path], tmp_path: Path) -> None:
    cases = [{**ONE, "leaves": 2}] + [{"trainer": {"world_size": 4, **sizes}, "leaves": 2} for sizes in FOUR]
    group = {"model": str(models["moe"]), "dtype": "float32", "completions": sequences(), "cases": cases}
    ((_, *metrics),) = gaps(tmp_path / "ranks", [group], world=4)
    for case, metric in zip(cases[1:], metrics, strict=True):
        assert metric["gap/tokens"] > 0 and metric["gap/max"] == 0.0, case


def checkpoint_keys(out: Path, case: str) -> set[str]:
    """Of all ranks together."""
    return {key for file in out.glob(f"{case}.[01].json") for key in json.loads(file.read_text())}


def same_gradients(stock: Path, exact: Path) -> None:
    """Those of stock operations on one rank, up to rounding."""
    wanted, got = load_file(stock), load_file(exact)
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        assert (got[name] - tensor).abs().max().item() <= 1e-5 * scale, name


@pytest.mark.slow("full grid of models")
@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("moe", "bfloat16", {}),
        ("moe", "float32", {"tensor": 2}),
        ("moe", "bfloat16", {"tensor": 2, "expert": 2}),
        ("qwen3", "bfloat16", {"tensor": 2}),
        ("qwen3", "float32", {}),
        ("qwen2", "float32", {}),
        ("llama", "bfloat16", {}),
        ("deepseek", "float32", {}),
        ("deepseek", "bfloat16", {"tensor": 2, "expert": 2}),
        ("direct", "float32", {"tensor": 2}),
        ("glm4_moe", "bfloat16", {"tensor": 2}),
    ],
)
def test_server_and_trainers_of_every_layout_agree_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, name: str, dtype: str, sizes: dict[str, int]
) -> None:
    other = exact_server.changed(models[name], tmp_path / "other")
    engine = exact_server.server(models[name], dtype, 2, EngineSizes(**sizes), tmp_path / "server.log")
    sampled = exact_server.run(engine, models[name], other)
    cases = cases_of(name, DENSE if name in ("qwen3", "qwen2", "llama") else TWO)
    groups = [{"model": model, "dtype": dtype, "completions": done, "cases": cases} for model, done in sampled.items()]
    stale = {"model": groups[0]["model"], "completions": groups[1]["completions"], "cases": [cases[0]], "dtype": dtype}
    *found, [seen] = gaps(tmp_path / "ranks", [*groups, stale])
    assert_none(groups, found)
    assert seen["gap/max"] > 0, "weights of another version must show"


@pytest.mark.slow("servers and trainers of four ranks")
@pytest.mark.parametrize(("name", "dtype"), [("moe", "bfloat16"), ("deepseek", "float32")])
def test_a_server_and_trainers_of_four_ranks_and_more_threads_agree(
    models: dict[str, Path], tmp_path: Path, name: str, dtype: str
) -> None:
    other = exact_server.changed(models[name], tmp_path / "other")
    engine = exact_server.server(models[name], dtype, 4, EngineSizes(), tmp_path / "server.log", threads=2)
    sampled = exact_server.run(engine, models[name], other)
    cases: list[dict[str, Any]] = [
        {"trainer": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 2}},
        {"trainer": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 1}},
        {"trainer": {"world_size": 2, "tensor": 2, "max_tokens_per_microbatch": 60}, "threads": 2},
        {**ONE, "threads": 2},
    ]
    if name == "deepseek":  # the other has two groups of heads
        cases.append({"trainer": {"world_size": 4, "tensor": 4}})
    cases = [{"leaves": 4, **case} for case in cases]
    groups = [{"model": model, "dtype": dtype, "completions": done, "cases": cases} for model, done in sampled.items()]
    stale = {"model": groups[0]["model"], "completions": groups[1]["completions"], "cases": [cases[0]], "dtype": dtype}
    *found, [seen] = gaps(tmp_path / "ranks", [*groups, stale], world=4)
    assert_none(groups, found)
    assert seen["gap/max"] > 0, "weights of another version must show"
