"""Results of exact mode's operations do not depend on the batch: checked alike on the CPU and on a GPU."""

from __future__ import annotations

import torch

from slimx.extras.exact import operations as exact
from tests.extras.exact.stand import assert_same_bits, values


def check_rows(dtype: torch.dtype, device: torch.device | str, count: int) -> None:
    """Checks that a row alone, at the start, in the middle and at the end of a batch has the same bits as among
    `count`."""
    rows, other = (values(count, 64, dtype=dtype, seed=seed).to(device) for seed in (1, 5))
    weight, vector = (values(*n, dtype=dtype, seed=2).to(device) for n in ((48, 64), (64,)))
    experts, bias = (
        values(3, 48, 64, dtype=dtype, seed=3).to(device),
        values(48, dtype=torch.float32, seed=4).to(device),
    )
    table = exact.rope_table(exact.rope_frequencies(16, 10000.0), 4).to(device)
    positions = torch.arange(count, device=device)

    def by_expert(at: torch.Tensor) -> torch.Tensor:
        """Computes each row by the expert of its position in the batch, sorted as a dispatcher does."""
        order = (at % 3).argsort(stable=True)
        out = exact.grouped_linear(rows[at][order], experts, torch.bincount(at % 3, minlength=3).tolist(), 2)
        return torch.empty_like(out).index_copy(0, order, out)

    def logits(at: torch.Tensor) -> torch.Tensor:
        return exact.linear(rows[at].float(), weight.float())

    operations = {
        "linear": lambda at: exact.linear(rows[at], weight, 2),
        "biased linear": lambda at: exact.linear(rows[at], weight, bias=bias),
        "grouped linear": by_expert,
        "rms_norm": lambda at: exact.rms_norm(rows[at], vector, 1e-6),
        "add_rms_norm": lambda at: exact.add_rms_norm(rows[at], other[at], vector, 1e-6)[0],
        "silu_and_mul": lambda at: exact.silu_and_mul(rows[at]),
        "rope": lambda at: exact.rope(*[t[at].view(len(at), 4, 16) for t in (rows, other)], table, at % 4)[1],
        "log_softmax": lambda at: exact.log_softmax(rows[at]),
        "token_logprobs": lambda at: exact.token_logprobs(rows[at], at % 64),
        "router": lambda at: exact.route(logits(at), 4)[0],
        "router by sigmoid": lambda at: exact.route(logits(at), 4, score="sigmoid", bias=bias, groups=4, top_groups=2)[
            0
        ],
        "combine": lambda at: exact.moe_combine(rows[at].view(-1, 4, 16), other[at, :4].float(), other[at, :16]),
    }
    parts = (slice(0, 1), slice(count - 1, count), slice(3, 10), slice(5, 22), slice(1, count))
    for name, operation in operations.items():
        whole = operation(positions)
        for part in parts:
            assert_same_bits(operation(positions[part]), whole[part], (name, part))
        assert_same_bits(operation(positions.flip(0)).flip(0), whole, (name, "backwards"))


def check_attention(dtype: torch.dtype, device: torch.device | str) -> None:
    """Checks the bits of a sequence alone, packed, in some rows, decoded, and prefilled after a cached prefix."""
    query, key, value, other = (
        values(150, heads, 32, dtype=dtype, seed=seed).to(device) for seed, heads in enumerate((4, 2, 2, 4))
    )
    alone = exact.attention(query, key, value, torch.tensor([0, 150]), 0.2)
    pack = [torch.cat((other[:9, : t.shape[1]], t)) for t in (query, key, value)]
    packed = exact.attention(*pack, torch.tensor([0, 9, 159]), 0.2)
    assert_same_bits(packed[9:], alone, "packed behind another")
    rows = torch.tensor([3, 149, 140], device=device)
    some = exact.attention(query[rows], key, value, torch.tensor([0, 150]), 0.2, rows=rows)
    assert_same_bits(some, alone[rows], "some rows")
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(5))[:150].int().to(device)
    cache = [torch.zeros(400, 2, 32, dtype=dtype, device=device).index_copy(0, slots.long(), t) for t in (key, value)]
    decode, chunk = torch.tensor([149], device=device), torch.arange(64, 150, device=device)
    for positions in (decode, chunk, rows):
        found = exact.gathered_attention(
            query[positions], *cache, slots, torch.zeros_like(positions), positions + 1, 0.2
        )
        assert_same_bits(found, alone[positions], len(positions))
