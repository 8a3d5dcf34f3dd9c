"""Adapters as peft trains them, an A for each module: what ranks read of them computes what peft does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slimx.config.sections.trainer import Lora
from slimx.extras.lora.merged import merged
from slimx.extras.lora.peft import PeftAdapters
from slimx.extras.lora.targets import adapts
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.models.files.reader import CheckpointReader
from tests.checkpoint_stand import QWEN3_MOE, write_checkpoint
from tests.peft_stand import logprobs, make_adapters
from tests.refusals import refused

_NOT_DENSE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "head_dim")
DENSE = {key: value for key, value in QWEN3_MOE.items() if key not in _NOT_DENSE} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(48) % 120
TP2 = Sizes(tensor=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen2") / "model", DENSE)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "model", QWEN3_MOE)


def merge(spec: ModelSpec, adapters: Path, lora: Lora, sizes: Sizes, out: Path) -> Path:
    """Returns the checkpoint with all adapters merged, rank by rank as in trainers of `sizes`."""
    found, reader = PeftAdapters(adapters), CheckpointReader(spec.path)
    found.check(spec.table, lora)
    whole = {name: torch.empty(shape) for name, shape in spec.table.checkpoint_shapes().items()}
    for part in MegatronLayout(spec.table, sizes).parts():
        local = torch.empty(part.matrix)
        cuts = [
            (
                local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols],
                whole[part.sources[r.source]].view(matrix(whole[part.sources[r.source]].shape))[
                    r.row : r.row + (r.rows - 1) * r.step + 1 : r.step, r.col : r.col + r.cols
                ],
                reader.read(part.sources[r.source], r),
            )
            for r in part.rects
        ]
        for mine, _, value in cuts:
            mine.copy_(value)
        if adapts(lora.targets, part.name) and len((pair := found.matrices(part))[0]):
            local.copy_(merged(local.clone(), *pair, lora.alpha / lora.rank))
        for mine, of_whole, _ in cuts:
            of_whole.copy_(mine)
    out.mkdir()
    (out / "config.json").write_text((Path(spec.path) / "config.json").read_text())
    save_file(whole, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("sizes", [Sizes(), TP2], ids=["one", "TP2"])
@pytest.mark.parametrize(
    ("config", "lora"),
    [
        ({"target_modules": ATTENTION + MLP}, {"rank": 9, "alpha": 15, "targets": ["attention", "mlp"]}),
        ({"target_modules": ["q_proj", "v_proj"]}, {"rank": 6, "alpha": 10, "targets": ["attention"]}),
        ({"target_modules": ["k_proj"]}, {"rank": 3, "alpha": 5, "targets": ["attention"]}),
        ({"target_modules": ["o_proj", "up_proj"]}, {"rank": 3, "alpha": 5, "targets": ["attention", "mlp"]}),
        ({"target_modules": MLP, "layers_to_transform": [1]}, {"rank": 6, "alpha": 10, "targets": ["mlp"]}),
        (
            {"target_modules": ATTENTION, "use_rslora": True},
            {"rank": 9, "alpha": 15 * 3**0.5, "targets": ["attention"]},
        ),
    ],
    ids=["all", "q-v", "k", "o-up", "mlp-of-one-layer", "rslora"],
)
def test_ranks_merge_to_what_peft_computes(config, lora, sizes, dense, tmp_path):
    model = make_adapters(dense, tmp_path / "peft", r=3, lora_alpha=5, **config)
    whole = merge(read_model(str(dense)), tmp_path / "peft", Lora(**lora), sizes, tmp_path / "merged")
    right = logprobs(model, IDS)
    with model.disable_adapter():
        assert (logprobs(model, IDS) - right).abs().max() > 0.1
    found = logprobs(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32), IDS)
    assert (found - right).abs().max() <= 1e-4


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(tensor=2, expert=2, expert_tensor=1)], ids=["one", "TP2-EP2"])
def test_experts_of_transformers_4_equal_those_that_peft_converts(sizes, experts, tmp_path):
    """Uses the names of most adapters of models with experts; peft 0.21.2 loads them with transformers 5."""
    random = torch.Generator().manual_seed(4)
    tensors = {}
    spec = read_model(str(experts))
    for name, (rows, cols) in (
        (name.removesuffix(".weight"), shape)
        for name, shape in spec.table.checkpoint_shapes().items()
        if name.endswith(tuple(f"{module}.weight" for module in MLP))
    ):
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.2 * torch.randn(2, cols, generator=random)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.2 * torch.randn(rows, 2, generator=random)
    (tmp_path / "peft").mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": MLP}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors", {"format": "pt"})
    whole = merge(spec, tmp_path / "peft", Lora(rank=4, alpha=8, targets=("experts",)), sizes, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    before = logprobs(plain, IDS)
    right = logprobs(peft.PeftModel.from_pretrained(plain, tmp_path / "peft"), IDS)
    assert (before - right).abs().max() > 0.1
    found = logprobs(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32), IDS)
    assert (found - right).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("lora", "code", "about"),
    [
        ({"rank": 3, "alpha": 5}, "peft.rank", "trainer.lora.rank"),
        ({"rank": 9, "alpha": 5}, "peft.alpha", "trainer.lora.alpha"),
        ({"rank": 9, "alpha": 15, "targets": ["attention", "mlp"]}, "peft.target", "trainer.lora.targets"),
    ],
)
def test_a_refusal_names_the_rank_and_alpha_to_write(lora: dict[str, Any], code, about, dense, tmp_path):
    make_adapters(dense, tmp_path / "peft", r=3, lora_alpha=5, target_modules=ATTENTION)
    with refused(code, about=about) as refusal:
        PeftAdapters(tmp_path / "peft").check(read_model(str(dense)).table, Lora(**{"targets": ["attention"]} | lora))
    if about != "trainer.lora.targets":
        assert "trainer.lora.rank=9 and trainer.lora.alpha=15" in str(refusal.value)
