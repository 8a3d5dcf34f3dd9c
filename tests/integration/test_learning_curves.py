"""Every RL algorithm learns the quickstart's task from the same warm start, with its hyper-parameters as
docs/algorithms.md has them: sampled reward from at most 0.4 to at least 0.7, where it still is after at least 40 steps
and has come to within 200.

An hour on two cores. Results stay in runs/learning-curves: a run that was broken off goes on at its last
checkpoint, and one that has arrived is not repeated; remove the directory to begin anew. Each run writes its curve into
curves.jsonl there.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from slimx.config.sections.objectives import PRESETS
from slimx.extras.quickstart.make_model import CONFIG, make_model, make_tokenizer
from slimx.extras.quickstart.make_task import make_task
from tests.integration.conftest import ROOT
from tests.integration.runs import TrainProcess, completed_steps, steps

pytestmark = [pytest.mark.integration, pytest.mark.slow("an hour of whole runs"), pytest.mark.timeout(6 * 3600)]

PLACE = ROOT / "runs" / "learning-curves"
FEWEST, STEPS, AT_MOST, AT_LEAST, MEAN_OF = 40, 200, 0.4, 0.7, 5
UPDATES = 4
"""Updates for each batch: in the first one all ratios are 1, and many losses are one function."""
SECTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"schedule": {"updates_per_step": 1}},  # the loss of one policy's pairs
    "gpg": {"schedule": {"updates_per_step": 1}},  # without a ratio it knows its own samples alone
    "gdpo": {"reward": {"function": "tests.integration.hooks.sum_in_parts"}},
    "gigpo": {"rollout": {"generate": "tests.integration.hooks.described_turn"}},
    "ppo": {"critic": {"optimizer": {"lr": 1e-3}}, "algorithm": {"advantages": {"lam": 0.95}}},
    "distillation": {"algorithm": {"teacher": str(PLACE / "teacher" / "hf")}},
}
"""Sections that a run needs besides the name of its algorithm. All others: the quickstart's configuration as it is."""
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Fields of a Qwen3-Next that a Qwen3-MoE does not have, or otherwise."""


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    out = {name: dict(section) for name, section in base.items()}
    for change in changes:
        for name, section in change.items():
            out[name] = {**out.get(name, {}), **section}
    return out


def write(name: str, *changes: dict[str, Any]) -> Path:
    base = yaml.safe_load((ROOT / "configs/moe" / name).read_text())
    base["model"]["path"] = str(PLACE / "task" / "model")
    config = merged(base, *changes, {"track": {"report": False, "tensorboard": False}})
    directory = Path(config["run"]["dir"])
    directory.mkdir(parents=True, exist_ok=True)
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    return file


def supervised(name: str, prompts: str, **changes: dict[str, Any]) -> None:
    """Trains a model on the answers of a file, unless it is there already."""
    if (PLACE / name / "hf" / "config.json").exists():
        return
    places = {"run": {"dir": str(PLACE / name)}, "rollout": {"prompts": str(PLACE / "task" / prompts)}}
    process = TrainProcess(write("quickstart-sft.yaml", places, changes))
    assert process.wait(3600) == 0, process.text()


@pytest.fixture(scope="module")
def warm_start() -> Path:
    if not (PLACE / "task" / "model" / "config.json").exists():
        make_task(PLACE / "task", seed=1)
        make_model(PLACE / "task/model", seed=1)
    supervised("warm", "demonstrations.jsonl")
    return PLACE / "warm" / "hf"


def curve(directory: Path) -> list[float]:
    """Returns the sampled reward by step."""
    if not (directory / "metrics.jsonl").exists():
        return []
    return [row["reward/mean"] for step, row in sorted(steps(directory).items()) if step]


def arrived(rewards: list[float]) -> bool:
    return len(rewards) >= FEWEST and sum(rewards[-MEAN_OF:]) / MEAN_OF >= AT_LEAST


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("sft", "bradley_terry")])
def test_an_algorithm_learns_the_quickstarts_task(name, warm_start):
    if name == "distillation":  # from a model that has seen right answers only
        supervised("teacher", "train.jsonl")
    algorithm = {"name": name, "reference": name != "distillation"}
    learn(name, {"trainer": {"load": str(warm_start)}, "algorithm": algorithm}, SECTIONS.get(name, {}))


def test_a_model_with_gated_delta_nets_learns_it_by_grpo(warm_start):
    """A Qwen3-Next of the quickstart's sizes: a delta net, then attention."""
    model = PLACE / "task" / "next"
    if not (model / "config.json").exists():
        make_next(model)
    supervised("warm-next", "demonstrations.jsonl", model={"path": str(model)})
    start = str(PLACE / "warm-next" / "hf")
    learn("qwen3_next", {"model": {"path": str(model)}, "trainer": {"load": start}, "algorithm": {"reference": True}})


def test_ppo_learns_it_from_a_reward_model_alone(warm_start):
    """Pairs of answers to a reward model, and its score to PPO, whose critic begins as that model; right answers, which
    the policy does not know, become most."""
    task, weights = PLACE / "task", PLACE / "rm" / "hf"
    held_out = {"prompts": str(task / "heldout-pairs.jsonl"), "every": 50}
    begun = {"trainer": {"load": str(warm_start)}, "eval": held_out}
    if not weights.exists():
        places = {"run": {"dir": str(PLACE / "rm")}, "rollout": {"prompts": str(task / "pairs.jsonl")}}
        process = TrainProcess(write("quickstart-rm.yaml", places, begun))
        assert process.wait(3600) == 0, process.text()
    judged = steps(PLACE / "rm")
    assert judged[0]["eval/accuracy"] == 0.5 and judged[max(judged)]["eval/accuracy"] >= 0.9
    directory = PLACE / "rlhf"
    config = merged(
        yaml.safe_load((ROOT / "configs/moe/quickstart-rlhf.yaml").read_text()),
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(task / "model")},
            "trainer": {"load": str(warm_start)},
            "rollout": {"prompts": str(task / "train.jsonl")},
            "critic": {"load": str(weights)},
            "schedule": {"steps": STEPS},
            "eval": {"prompts": str(task / "heldout.jsonl"), "every": None},
        },
    )
    (part,) = (part for part in config["reward"]["parts"] if part["name"] == "right")
    (judge,) = (engine for engine in config["rollout"]["engines"] if engine.get("frozen"))
    judge["model"] = str(weights)
    file = write("quickstart-rlhf.yaml", config)

    def right() -> list[float]:
        rows = steps(directory) if (directory / "metrics.jsonl").exists() else {}
        return [row["reward/part/right/mean"] / part["weight"] for step, row in sorted(rows.items()) if step]

    if not arrived(right()):
        process = TrainProcess(file)
        process.until(lambda: arrived(right()) or completed_steps(directory) >= STEPS, 2 * 3600)
        process.kill(signal.SIGTERM)
        process.wait()
    assert right()[0] <= AT_MOST and arrived(right()), right()


def make_next(out: Path) -> None:
    hf = {key: value for key, value in CONFIG.items() if key != "use_sliding_window"} | NEXT
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{key: value for key, value in hf.items() if key != "torch_dtype"})
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    (out / "config.json").write_text(json.dumps(hf))


def learn(name: str, *changes: dict[str, Any]) -> None:
    """Asserts that a run of the quickstart with `changes` learns its task and stays there."""
    directory, task = PLACE / name, PLACE / "task"
    ours = {
        "run": {"dir": str(directory)},
        "rollout": {"prompts": str(task / "train.jsonl")},
        "schedule": {"steps": STEPS, "updates_per_step": UPDATES},
        "eval": {"prompts": str(task / "heldout.jsonl"), "every": None},
    }
    config = write("quickstart.yaml", ours, *changes)
    if not arrived(curve(directory)):
        run = TrainProcess(config)
        run.until(lambda: arrived(curve(directory)) or completed_steps(directory) >= STEPS, 2 * 3600)
        run.kill(signal.SIGTERM)
        run.wait()
    rewards = curve(directory)
    line = {"name": name, "date": time.strftime("%Y-%m-%d"), "steps": len(rewards), "reward": rewards}
    with (PLACE / "curves.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert rewards[0] <= AT_MOST, "the warm start is better than it should be"  # sampled before the first update
    assert arrived(rewards), f"{name} reached {rewards[-MEAN_OF:]} in {len(rewards)} steps"
