"""SGLang with its own LoRA layers: the cases that rules refuse, and the results in all others."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.errors import SlimxError
from slimx.extras.lora.adapters import sglang as sglang_lora
from slimx.extras.lora.form import ServedLora
from slimx.layout.form import server_form
from slimx.models.families import read_model
from tests.function_call import call_with_sglang
from tests.unit.adapters.receiver_stand import publish
from tests.unit.adapters.sglang_ranks import built, join

ARGUMENTS = ["server", "--publish-adapters", "first=8.0,second=2.0"]
"""Those of the server."""
RANK, ALPHAS = 4, {"first": 8.0, "second": 2.0}
PUBLISHED = (
    ("whole", "first", "first"),
    ("alone", "second", "second"),
    ("whole, with others", "second", "newer"),
    ("again", "first", "second"),
)
"""Publications in their order: name, policy, and name of the adapters."""
PARTS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
"""SGLang's module -> the checkpoint's that it fuses."""
TARGETS = [part for parts in PARTS.values() for part in parts]
TOKENS = [("first", 3), (None, 2), ("second", 4)]
"""Adapter and tokens of each request of the batch."""
SPOILT = "model.layers.0.mlp.gate_up_proj"
"""Layer in whose adapter and weight a number is changed: the last of the up projection."""

Tensors = dict[str, torch.Tensor]
FUSED = {"down_proj": 1, "gate_up_proj": 2, "o_proj": 1, "qkv_proj": 3}
"""SGLang's modules with adapters, and of how many of the checkpoint's each is."""
HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def managed(model: torch.nn.Module) -> Any:
    """Returns SGLang's manager of the adapters of `model`, which it wraps."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.runtime_context import get_server_args

    return LoRAManager(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=len(ALPHAS) + 1,
        load_config=LoadConfig(),
        dtype=torch.float32,
        server_args=get_server_args(),
        lora_backend="torch_native",
        max_lora_rank=RANK,
        target_modules=TARGETS,
    )


def adapters(checkpoint: Tensors) -> dict[str, Tensors]:
    """Returns adapters of every projection of `checkpoint`, by their PEFT names."""
    generator, out = torch.Generator().manual_seed(1), {}
    for name in (*ALPHAS, "newer"):
        out[name] = {}
        for weight, value in checkpoint.items():
            module = weight.removesuffix(".weight")
            if module.rpartition(".")[2] in TARGETS:
                for letter, shape in (("A", (RANK, value.shape[1])), ("B", (value.shape[0], RANK))):
                    key = f"base_model.model.{module}.lora_{letter}.weight"
                    out[name][key] = torch.randn(shape, generator=generator) * 0.1
    return out


def merged(checkpoint: Tensors, tensors: Tensors, alpha: float, module: str) -> torch.Tensor:
    """Returns the weight of `module` merged with the adapter `tensors`."""
    a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    return checkpoint[f"{module}.weight"] + alpha / RANK * b @ a


def serve(manager: Any, tensors_of: dict[str, Tensors]) -> None:
    """Loads adapters as the server's endpoint does, and prepares a batch of `TOKENS`."""
    from sglang.srt.lora.lora_registry import LoRARef

    for name, alpha in ALPHAS.items():
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": TARGETS}
        reference = LoRARef(lora_id=name, lora_name=name, lora_path="__tensor__", pinned=True)
        result = manager.load_lora_adapter_from_tensors(reference, tensors_of[name], config)
        assert result.success, result.error_message
    prepare_batch(manager, [name for name, _ in TOKENS])


def prepare_batch(manager: Any, names: list[str | None]) -> None:
    """Prepares the layers for the next batch: the token counts of `TOKENS`, of requests for the adapters `names`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    manager.fetch_new_loras(set(names))
    lengths = [count for _, count in TOKENS]
    manager.prepare_lora_batch(
        SimpleNamespace(
            lora_ids=names,
            batch_size=len(names),
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens_cpu=lengths,
            extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            extend_num_tokens=sum(lengths),
        )
    )


def compare(manager: Any, checkpoint: Tensors, expected: list[tuple[Tensors | None, float]]) -> dict[str, float]:
    """Returns the largest "distance" and "effect" over all layers; `expected`: adapter and alpha of each request."""
    apart, effects = [], []
    for module, parts in PARTS.items():
        name = f"model.layers.0.{module}"
        layer = manager.base_model.get_submodule(name)
        below = name.rpartition(".")[0]
        x = torch.randn(sum(c for _, c in TOKENS), checkpoint[f"{below}.{parts[0]}.weight"].shape[1])
        found, start = layer(x)[0], 0
        for (adapter, alpha), (_, count) in zip(expected, TOKENS, strict=True):
            rows = slice(start, start + count)
            base, whole = (
                torch.cat(
                    [
                        checkpoint[f"{below}.{part}.weight"]
                        if tensors is None
                        else merged(checkpoint, tensors, alpha, f"{below}.{part}")
                        for part in parts
                    ]
                )
                for tensors in (None, adapter)
            )
            apart.append((found[rows] - x[rows] @ whole.T).abs().max().item())
            effects.append((x[rows] @ (whole - base).T).abs().max().item())
            start += count
    return {"distance": max(apart), "effect": max(effects)}


def published(
    plain: torch.nn.Module, model: torch.nn.Module, checkpoint: Tensors, by_name: dict[str, Tensors]
) -> dict[str, Any]:
    """Publishes to `model`, which SGLang wraps with the plugin's hooks active, and to `plain`; returns the outcome."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    report: dict[str, Any] = {"refused": [code_of(lambda: publish(plain, by_name["first"], encoding="adapters"))]}
    server_form(ARGUMENTS).register(HookRegistry, HookType)
    HookRegistry.apply_hooks()
    manager, receiver = managed(model), receiver_of(model)
    report["refused"].append(code_of(lambda: publish(model, by_name["first"], encoding="adapters", policy="first")))
    report["refused"].append(code_of(lambda: publish(model, checkpoint, policy="third")))
    holding: dict[str | None, Tensors] = {}
    for version, (how, policy, name) in enumerate(PUBLISHED, 1):
        encoding = "hf" if how.startswith("whole") else "adapters"
        weights = by_name[name] if encoding == "adapters" else {**checkpoint, **by_name[name]}
        others = {other: copied(slot.buffers()) for other, slot in receiver.adapters.items() if other != policy}
        publish(model, weights, version, encoding=encoding, policy=policy)
        proof = receiver.verify()
        receiver.commit(version=version)
        same = (
            torch.equal(receiver.adapters[o].buffers()[n], b)
            for o, buffers in others.items()
            for n, b in buffers.items()
        )
        holding[policy] = by_name[name]
        prepare_batch(manager, [adapter for adapter, _ in TOKENS])
        expected = [(holding.get(name or "first"), ALPHAS[name or "first"]) for name, _ in TOKENS]
        report[how] = compare(manager, checkpoint, expected) | {"proof": proof, "kept": all(same)}
    report["attested"] = server_form(ARGUMENTS).attest(SimpleNamespace(lora_manager=manager))
    other = {name: value + 1 for name, value in checkpoint.items()} | by_name["second"]
    report["refused"].append(code_of(lambda: publish(model, other, 9, policy="second")))
    report["spoilt"] = []
    of_slots = (receiver.adapters[policy].buffers()[f"{SPOILT}.lora_B"] for policy in ALPHAS)
    for tensor in (*of_slots, model.get_submodule(SPOILT).weight.data):
        tensor.view(-1)[-1] += 1
        report["spoilt"].append(receiver.verify()["differ"])
    return report


def copied(buffers: Tensors) -> Tensors:
    """Returns a copy of what the buffers hold now."""
    return {name: buffer.clone() for name, buffer in buffers.items()}


def code_of(work: Callable[[], None]) -> str | None:
    """Returns the code of the refusal of `work`."""
    try:
        work()
    except SlimxError as error:
        return error.code
    return None


def built_again(model: torch.nn.Module, checkpoint: Tensors) -> torch.nn.Module:
    """Returns a new model like `model`, which a failed manager may have wrapped in part."""
    fresh = type(model)(config=model.config)
    fresh.load_weights(iter(checkpoint.items()))
    return fresh


def lora_engine(path: str) -> dict[str, Any]:
    """Computes with SGLang's LoRA layers around a tiny Qwen3 on the CPU: as shipped but without pinned memory, and as
    in servers to which slimx publishes adapters.

    Returns "pinned": the error that ends SGLang without a GPU, and its file; "distance", "effect": the largest distance
    of outputs from those of the merged weights, over tokens with two adapters and without, and the largest effect of
    the adapters; "whole", "alone", "whole, with others", "again": the same after publications of everything for the
    policy `first`, of adapters for `second`, of everything for `second` and of adapters for `first`, with the result of
    `verify` ("proof") and whether the other policy's slot was unchanged ("kept"); "spoilt": the result of `verify`
    after a value of either policy's adapters or of the base was changed; "refused": the codes of the refused
    publications.
    """
    model = built(join(path, dtype="float32"))
    checkpoint: Tensors = load_file(Path(path) / "model.safetensors")
    model.load_weights(iter(checkpoint.items()))
    report: dict[str, Any] = {}
    try:
        managed(model)
    except RuntimeError as error:
        frames = (frame for frame in traceback.extract_tb(error.__traceback__) if "sglang" in frame.filename)
        report["pinned"] = {"error": str(error), "file": Path([*frames][-1].filename).name}
    by_name = adapters(checkpoint)
    with torch.no_grad():
        with sglang_lora.unpinned():
            manager = managed(built_again(model, checkpoint))
            serve(manager, by_name)
            expected = [(by_name.get(name), ALPHAS.get(name, 0.0)) for name, _ in TOKENS]
            report |= compare(manager, checkpoint, expected)
        plain, model = (built_again(model, checkpoint) for _ in range(2))
        return report | published(plain, model, checkpoint, by_name)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the findings of `lora_engine`, with the number of the checkpoint's weights."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(HF))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model(path).table.checkpoint_shapes()
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors")
    return call_with_sglang(lora_engine, str(path)) | {"weights": len(weights)}


def test_sglang_computes_with_unpinned_adapters_what_merged_weights_do(
    report: dict[str, Any],
) -> None:
    """Removes the need for a GPU (`lora.served_on_cpu`). One batch then uses two adapters of different scales and none,
    and every projection is that of merged weights."""
    assert report["pinned"]["file"] == "layers.py", report
    assert report["distance"] <= 1e-5 < 0.1 < report["effect"], report


def test_adapters_are_published_with_their_base_then_alone_and_verified(report: dict[str, Any]) -> None:
    """Checks that each policy's publication writes its slot only, and verifies the base and every slot. Requests
    without an adapter get the first policy's; another policy cannot publish another base."""
    refusals = ["receiver.no_adapters", "receiver.no_base", "receiver.policy", "receiver.other_base"]
    assert report["refused"] == refusals
    assert report["attested"] == {"rank": 4, "scales": {"first": 2.0, "second": 0.5}}
    counts = {}
    kinds = ("whole", "alone", "whole, with others", "again")
    for how in kinds:
        assert report[how]["distance"] <= 1e-5 < 0.1 < report[how]["effect"], report
        assert report[how]["kept"]
        proof = report[how]["proof"]
        assert not proof["differ"] and not proof["missing"]
        counts[how] = proof["tensors"]
    few = 2 * sum(FUSED.values())
    assert counts == dict(zip(kinds, 2 * [report["weights"] + few, few], strict=True))
    up = "model.layers.0.mlp.up_proj"
    adapter = f"base_model.model.{up}.lora_B.weight"
    wrong = [adapter, f"second:{adapter}", f"{up}.weight"]
    assert [set(differ) for differ in report["spoilt"]] == [set(wrong[:count]) for count in (1, 2, 3)]


@pytest.mark.parametrize(
    ("policies", "named", "rid", "taken"),
    [
        ({"actor": 8.0}, None, "r", True),
        ({"actor": 8.0}, "judge", "r", False),
        ({"actor": 8.0, "judge": 8.0}, "judge", "r", True),
        ({"actor": 8.0, "judge": 8.0}, None, "r", False),
        ({"actor": 8.0, "judge": 8.0}, None, "HEALTH_CHECK_1", True),
    ],
)
def test_requests_to_several_policies_name_theirs(
    policies: dict[str, float], named: str | None, rid: str, taken: bool
) -> None:
    """Refuses unnamed requests, which would silently use another policy, and unknown names, which would crash SGLang's
    scheduler."""
    with contextlib.nullcontext() if taken else pytest.raises(ValueError, match=", ".join(policies)):
        ServedLora(policies).check_request(SimpleNamespace(lora_id=named, rid=rid))
