"""A whole run of a DeepSeek-V3: every part split, latent attention and experts published in the engine's own layout by
each trainer rank straight to the engine's machine, over NIXL on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.deepseek_checkpoint import make_deepseek
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "mode", [pytest.param("fast", marks=pytest.mark.slow("a whole run; exact mode is the other")), "exact"]
)
def test_two_trainer_and_two_engine_ranks_agree_after_every_publication(mode, task_of_sums, tmp_path):
    model = tmp_path / "model"
    make_deepseek(model)
    config = write_config(
        tmp_path,
        model,
        task_of_sums / "train.jsonl",
        numerics={"mode": mode},
        # The pass over the old policy, which an exact run leaves out by itself.
        algorithm={"old_logprobs": "recompute"},
        trainer={"tensor": 2, "expert": 2, "expert_tensor": 1, "moe": {"bias_update_rate": 0.05}},
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "engines": [{"name": "actor", "max_total_tokens": 4096, "tensor": 2, "expert": 2}],
        },
        schedule={"steps": 2},
        # Small buckets: slots of both rings are used again within a publication.
        # The first publication brings whole weights and the others what has changed, in exact mode.
        publish={
            "transport": "nixl",
            "bucket_mib": 0.25,
            "delta": {"every_full": 3} if mode == "exact" else None,
        },
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert (
            row["gap/tokens"] > 0
            and row["gap/max"] <= (1e-4 if mode == "fast" else 0.0)
            and row["gap/tokens_unexplained"] == 0
        )
        assert row["mismatch/max"] <= (1e-4 if mode == "fast" else 0.0)
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
        assert row["publish/tensors_verified"] > 0 and row["publish/wire_mib"] > 0
    before, exported = (_weights(path) for path in (model, tmp_path / "run" / "hf"))
    assert exported.keys() == before.keys()
    moved = [name for name, tensor in exported.items() if not torch.equal(tensor, before[name])]
    # The biases move by their rate, and engines choose by the moved ones: the second step's routes are the trainer's.
    for name in moved:
        if name.endswith("e_score_correction_bias"):
            moves = (exported[name] - before[name]) / 0.05
            assert moves.any() and torch.allclose(moves, moves.round(), atol=1e-3) and moves.abs().max() <= 2.01
    assert any("e_score_correction_bias" in name for name in moved)
    assert rows[2]["gap/tokens_other_routes"] == 0
    assert any("kv_b_proj" in name for name in moved) and any("experts.7." in name for name in moved)


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
