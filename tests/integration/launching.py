"""What the tests of scripts/launch share: two nodes on one machine, each with a loopback address of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.conftest import ROOT
from tests.integration.runs import write_config

LAUNCH = ROOT / "scripts/launch"


def write_setup(directory: Path, *lines: str) -> Path:
    """A file for SLIMX_NODE_SETUP: node k of a job has the address 127.0.0.(k + 2)."""
    setup = directory / "setup.sh"
    address = "SLIMX_ADDRESS=127.0.0.$((2 + ${NODE_RANK:-${SLURM_PROCID:-0}}))"
    setup.write_text("\n".join([address, f"export PYTHONPATH={ROOT} PYTHONWARNINGS=ignore", *lines, ""]))
    return setup


def recording_config(directory: Path, model: Path, task: Path, **sections: dict[str, Any]) -> Path:
    """A run over two nodes that writes down every trajectory's tokens, one request at a time: the same every time."""
    directory.mkdir()
    prompts = directory / "prompts.jsonl"
    with prompts.open("w") as file:
        for line in (task / "train.jsonl").open():
            prompt = json.loads(line)
            prompt["metadata"]["record"] = str(directory / "tokens.jsonl")
            file.write(json.dumps(prompt) + "\n")
    return write_config(
        directory,
        model,
        prompts,
        rollout={
            "prompts": str(prompts),
            "prompts_per_step": 4,
            "group_size": 2,
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": 4},
            "engines": [{"name": "actor", "max_total_tokens": 8192}],
            "generate": "tests.integration.hooks.recording",
            "concurrency": 1,
        },
        publish={"transport": "gloo"},
        **sections,
    )


def recorded_tokens(directory: Path) -> dict[str, list[int]]:
    """Every trajectory's tokens by id; one that was generated twice must be the same."""
    out: dict[str, list[int]] = {}
    for line in (directory / "tokens.jsonl").open():
        record = json.loads(line)
        assert out.setdefault(record["id"], record["tokens"]) == record["tokens"], record["id"]
    return out
