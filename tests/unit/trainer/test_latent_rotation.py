"""The fused rotation of queries and keys: the models that have one, and what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from slimx.models.families import read_model
from slimx.trainer.model.transformer import fused_rotation
from slimx.trainer.process import install_adapters
from tests.function_call import call_in_process

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ("DeepSeek-V3", True),
        ("Kimi-K2-Instruct", True),
        ("DeepSeek-V3.2", False),
        ("GLM-5", False),
        ("Qwen3-30B-A3B", True),
        ("gpt-oss-120b-bf16", False),
    ],
)
def test_rotation_is_fused_where_a_kernel_computes_it(model: str, fused: bool) -> None:
    assert fused_rotation(read_model(ROOT / "configs" / "moe" / "models" / model)) is fused


LENGTHS = (8, 12, 4)
HEADS, WIDTH, TURNED, VALUE = 3, 16, 8, 32
KERNELS = ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel")


class Place(NamedTuple):
    """The attributes that both rotations read of a group of context-parallel ranks."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def differences(place: Place) -> list[float]:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    turns = YarnRotaryEmbedding(
        TURNED,
        rotary_base=10_000,
        scaling_factor=4.0,
        original_max_position_embeddings=8,
        mscale=1.0,
        mscale_all_dim=0.5,
        use_cpu_initialization=True,
        cp_group=place,
    )
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    tokens, longest = sum(LENGTHS) // place.ranks, max(LENGTHS)
    cosines, sines = turns.get_cached_cos_sin(longest, dtype=torch.float32, packed_seq=True)
    angles, factor = turns(longest, packed_seq=True)
    widths = ((HEADS, WIDTH + TURNED), (HEADS, WIDTH + VALUE), (1, TURNED))
    query, joined, shared = inputs = [torch.randn(tokens, *width, requires_grad=True) for width in widths]

    def turn(part: torch.Tensor) -> torch.Tensor:
        return _apply_rotary_pos_emb_thd(
            part, bounds, angles, mla_rotary_interleaved=True, mscale=factor, cp_group=place
        )

    plain = (
        torch.cat([query[..., :WIDTH], turn(query[..., WIDTH:])], -1),
        torch.cat([joined[..., :WIDTH], turn(shared).expand(-1, HEADS, -1)], -1),
        joined[..., WIDTH:],
    )
    by_kernels = (
        # It writes into the query that it is given.
        fused.fused_apply_mla_rope_for_q(query.clone(), cosines, sines, WIDTH, TURNED, bounds, *place),
        *fused.fused_apply_mla_rope_for_kv(joined, shared, cosines, sines, TURNED, WIDTH, VALUE, bounds, *place),
    )
    above = [torch.randn_like(output) for output in plain]
    gradients = (torch.autograd.grad(outputs, inputs, [a.clone() for a in above]) for outputs in (plain, by_kernels))
    expected, found = (outputs + grads for outputs, grads in zip((plain, by_kernels), gradients, strict=True))
    return [(one - other).abs().max().item() for one, other in zip(expected, found, strict=True)]


def rotations() -> dict[str, list[float]]:
    """Compares megatron-core's fused rotation of latent attention, run by Triton's interpreter, with its plain one.

    Returns the largest difference of queries, keys, values and their gradients, by case. In float32: the interpreter
    does not compute in bfloat16.
    """
    install_adapters()
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

    torch.manual_seed(0)
    for name in KERNELS:  # tuning measures on a GPU
        kernel = getattr(fused, name)
        kernel.configs = kernel.configs[:1]
    places = (Place(0, 1), Place(0, 2), Place(1, 2))
    return {f"{place.number} of {place.ranks}": differences(place) for place in places}


@pytest.mark.slow("a process that imports megatron-core")
def test_the_fused_latent_rotation_equals_the_plain_one_bit_for_bit() -> None:
    """Packed sequences, alone and as both ranks of context parallelism; also where the query is written in place."""
    found = call_in_process(rotations, environment={"TRITON_INTERPRET": "1"})
    assert len(found) == 3 and all(len(differences) == 6 for differences in found.values())
    assert {difference for differences in found.values() for difference in differences} == {0.0}, found
