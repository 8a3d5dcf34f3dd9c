"""Adapters in PEFT's format: those of a whole model are cut as a rank holds them, and others are refused by name. That
exported ones come back to the last bit is in tests/integration/test_lora.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.trainer import Lora
from slimx.extras.lora.peft import PeftAdapters
from slimx.extras.lora.targets import adapter_parts, adapter_targets, adapts
from slimx.extras.vision.nesting import Stack, nested_table
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.preflight.facts import model_facts, weight_facts
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.plan.copy_plan import compile_plan
from tests.checkpoint_stand import QWEN3_MOE
from tests.refusals import refused
from tests.unit.reshard.packer_stand import pack_all

RANK, LAYERS, EXPERTS, HIDDEN, INNER = 2, 4, 8, 48, 32
LORA = Lora(rank=RANK, alpha=4.0)
ROWS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
O_PROJ = "base_model.model.model.layers.3.self_attn.o_proj"
K_PROJ = "base_model.model.model.layers.1.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]


def adapters() -> tuple[dict[str, Any], Tensors]:
    """Returns configuration and tensors of adapters of the tiny Qwen3-MoE."""
    made = torch.Generator().manual_seed(0)
    tensors: Tensors = {}

    def put(name: str, a: torch.Tensor, rows: int) -> None:
        tensors[f"base_model.model.model.layers.{name}.lora_A.weight"] = a
        rank = RANK * EXPERTS if ".experts" in name else RANK
        tensors[f"base_model.model.model.layers.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=made)

    for layer in range(LAYERS):
        shared = torch.randn(RANK, HIDDEN, generator=made)
        for module, rows in ROWS.items():
            put(f"{layer}.self_attn.{module}", shared.clone(), rows)
        put(f"{layer}.self_attn.o_proj", torch.randn(RANK, 64, generator=made), HIDDEN)
        put(f"{layer}.mlp.experts.base_layer", torch.randn(EXPERTS * RANK, HIDDEN, generator=made), 2 * INNER)
        put(f"{layer}.mlp.experts", torch.randn(EXPERTS * RANK, INNER, generator=made), HIDDEN)
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "bias": "none", "rank_pattern": {}}, tensors


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(tensor=2, pipeline=2, data=2)], ids=["one", "TP2-PP2-DP2"])
def test_adapters_published_alone_have_pefts_bits(qwen, tmp_path, sizes):
    """Checks each module's A and B, however the ranks split them; one rank sends data that several have."""
    config, tensors = adapters()
    found = PeftAdapters(write(tmp_path / "peft", config, tensors))
    table, by_rank = read_model(str(qwen)).table, []
    for rank in range(sizes.world):
        by_rank.append(tensors_of_rank := {})
        for part in MegatronLayout(table, sizes).parts_of(rank):
            if adapts(["attention"], part.name):
                path = part.name.removesuffix(".weight")
                tensors_of_rank |= zip((f"{path}.lora_a", f"{path}.lora_b"), found.matrices(part), strict=True)
    plan = compile_plan(
        adapter_parts(MegatronLayout(table, sizes).parts(), ["attention"], RANK),
        adapter_targets(table, ["attention"], RANK),
        precision=Precision("float32", "float32"),
        bucket_bytes=4096,
    )
    expected = {name: tensor for name, tensor in tensors.items() if ".self_attn." in name}
    sent = {}
    for packed, memory in pack_all(plan, by_rank):
        for one in packed.tensors:
            run = memory[one.offset : one.offset + one.nbytes]
            assert checksum_tensor(expected[one.name]) == one.checksum
            sent[one.name] = run.view(torch.float32).view(one.shape)
    assert plan.count > 1 and not plan.unread and sent.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def shares(product: torch.Tensor, heads: int) -> torch.Tensor:
    return product.view(heads, -1, product.shape[-1])


def test_a_rank_reads_the_rows_and_columns_that_it_holds(qwen, tmp_path):
    _, tensors = written = adapters()
    found = PeftAdapters(write(tmp_path / "peft", *written))
    table = read_model(str(qwen)).table
    found.check(table, LORA)
    for rank in range(2):
        local = MegatronLayout(table, Sizes(tensor=2, expert=2, expert_tensor=1)).parts_of(rank)
        parts = {part.name: part for part in local}

        a, b = found.matrices(parts["decoder.layers.1.self_attention.linear_qkv.weight"])
        whole = {m: tensors[f"{K_PROJ.replace('k_proj', m)}.lora_B.weight"] for m in ROWS}
        # Of two groups of heads each rank has one: two heads of the query, one of key and of value.
        q, k, v = (shares(whole[module], heads) for module, heads in zip(ROWS, (4, 2, 2), strict=True))
        assert torch.equal(a, tensors[f"{K_PROJ}.lora_A.weight"])
        assert torch.equal(b, torch.cat([q[2 * rank], q[2 * rank + 1], k[rank], v[rank]]))

        a, b = found.matrices(parts["decoder.layers.3.self_attention.linear_proj.weight"])
        assert torch.equal(a, tensors[f"{O_PROJ}.lora_A.weight"].chunk(2, 1)[rank])
        assert torch.equal(b, tensors[f"{O_PROJ}.lora_B.weight"])

        name = "base_model.model.model.layers.2.mlp.experts.base_layer"
        for local in range(4):
            expert = 4 * rank + local
            a, b = found.matrices(parts[f"decoder.layers.2.mlp.experts.linear_fc1.weight{local}"])
            assert torch.equal(a, tensors[f"{name}.lora_A.weight"][RANK * expert : RANK * expert + RANK])
            assert torch.equal(b, tensors[f"{name}.lora_B.weight"][:, expert::EXPERTS])


@pytest.mark.parametrize("stack", ["stacked", "transposed"])
def test_adapters_of_stacked_experts_are_cut_as_those_of_separate_ones(qwen, tmp_path, stack: Stack):
    """Compares a checkpoint that has a tensor for each expert with one that has stacks."""
    config, tensors = adapters()
    own = PeftAdapters(write(tmp_path / "own", config, tensors))
    nested = {name.replace("model.layers.", "model.language_model.layers."): value for name, value in tensors.items()}
    found = PeftAdapters(write(tmp_path / "nested", config, nested))
    separate = read_model(str(qwen)).table
    stacked = nested_table(separate, (), stack)
    assert not any(".experts.0." in name for name in stacked.checkpoint_shapes())
    found.check(stacked, LORA)
    sizes = Sizes(tensor=2, expert=2, expert_tensor=2, data=2)
    pairs = list(zip(MegatronLayout(stacked, sizes).parts(), MegatronLayout(separate, sizes).parts(), strict=True))
    for part, other in pairs:
        assert (part.name, part.shape, part.ranks) == (other.name, other.shape, other.ranks)
        if adapts(None, part.name):
            for matrix, expected in zip(found.matrices(part), own.matrices(other), strict=True):
                assert torch.equal(matrix, expected), part.name
    assert sum(part.name.startswith("decoder.layers.0.mlp.experts.") for part, _ in pairs) > EXPERTS


def changed(**fields: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config.update(fields)


def extra(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda _, tensors: tensors.update({name: torch.zeros(RANK, HIDDEN)})


@pytest.mark.parametrize(
    ("change", "code", "about"),
    [
        (changed(peft_type="LOHA"), "peft.kind", "peft_type"),
        (changed(r=None), "peft.field", "r"),
        (changed(lora_alpha=8), "peft.alpha", "trainer.lora.alpha"),
        (changed(use_rslora=True), "peft.alpha", "trainer.lora.alpha"),
        (changed(rank_pattern={"q_proj": 8}), "peft.field", "rank_pattern"),
        (changed(alpha_pattern={"q_proj": 8}), "peft.field", "alpha_pattern"),
        (changed(use_dora=True), "peft.field", "use_dora"),
        (changed(modules_to_save=["lm_head"]), "peft.field", "modules_to_save"),
        (changed(init_lora_weights="pissa"), "peft.field", "init_lora_weights"),
        (extra("base_model.model.lm_head.lora_A.weight"), "peft.unknown", "base_model.model.lm_head.lora_A.weight"),
        (lambda _, tensors: tensors.pop(f"{O_PROJ}.lora_B.weight"), "peft.missing", f"{O_PROJ}.lora_B.weight"),
        (extra(f"{O_PROJ}.lora_A.weight"), "peft.shape", f"{O_PROJ}.lora_A.weight"),
        (extra(f"{K_PROJ}.lora_A.weight"), "peft.rank", "trainer.lora.rank"),
    ],
)
def test_adapters_that_a_run_cannot_go_on_with_are_refused(change, code, about, qwen, tmp_path):
    config, tensors = adapters()
    change(config, tensors)
    found = PeftAdapters(write(tmp_path / "peft", config, tensors))
    with refused(code, about=about):
        found.check(read_model(str(qwen)).table, LORA)


def test_adapters_that_are_not_finite_are_refused_by_their_tensor(qwen, tmp_path):
    config, tensors = adapters()
    name = f"{O_PROJ}.lora_B.weight"
    tensors[name][3, 1] = float("nan")
    found = PeftAdapters(write(tmp_path / "peft", config, tensors))
    parts = {part.name: part for part in MegatronLayout(read_model(str(qwen)).table, Sizes()).parts()}
    with refused("checkpoint.finite", about=name):
        found.matrices(parts["decoder.layers.3.self_attention.linear_proj.weight"])


def test_directories_that_hold_no_adapters_are_refused_before_a_run(qwen, tmp_path):
    def problems(path: Path) -> list[tuple[str | None, str | None]]:
        lora = {"rank": RANK, "alpha": 4, "load": str(path)}
        config = Config.model_validate(
            {
                "run": {"dir": "r"},
                "model": {"path": str(qwen)},
                "rollout": {"prompts": "p"},
                "trainer": {"lora": lora},
            }
        )
        facts = model_facts(config, read_model(str(qwen)))
        found = broken(all_rules(), facts | weight_facts(config), before=facts)
        return [(error.code, error.about) for error in found]

    assert QWEN3_MOE["hidden_size"] == HIDDEN
    assert problems(write(tmp_path / "good", *adapters())) == []
    assert problems(tmp_path) == [("peft.none", str(tmp_path))]
    damaged = write(tmp_path / "damaged", *adapters()) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    assert problems(damaged.parent) == [("peft.file", "adapter_model.safetensors")]
