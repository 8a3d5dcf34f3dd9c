"""A small decoder of the operations of exact mode alone: what a whole model's order of operations amounts to."""

from __future__ import annotations

import torch

from slimx.extras.exact import operations as exact

HIDDEN, HEADS, GROUPS, WIDTH, INNER, EXPERTS, CHOSEN, LAYERS, VOCABULARY = 64, 4, 2, 16, 48, 8, 3, 2, 300


class Decoder:
    """Attention and sparse experts, random weights of `dtype` on `device`, the same on every device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu"):
        dice = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=dice) * shape[-1] ** -0.5).to(dtype).to(device)

        self.embedding = make(VOCABULARY, HIDDEN) * 8
        self.table = exact.rope_table(exact.rope_frequencies(WIDTH, 10000.0), 512).to(device)
        self.ones = torch.ones(HIDDEN, dtype=dtype, device=device)
        self.layers = [
            {
                "qkv": make((HEADS + 2 * GROUPS) * WIDTH, HIDDEN),
                "out": make(HIDDEN, HEADS * WIDTH),
                "gate": make(EXPERTS, HIDDEN),
                "up": make(EXPERTS, 2 * INNER, HIDDEN),
                "down": make(EXPERTS, HIDDEN, INNER),
            }
            for _ in range(LAYERS)
        ]

    def logprobs(self, tokens: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """Computes packed tokens [T], sequences between `bounds` -> log-probabilities [T, VOCABULARY] of the next
        token."""
        ends = torch.tensor(bounds)
        positions = torch.cat([torch.arange(n) for n in (ends[1:] - ends[:-1]).tolist()]).to(tokens.device)
        residual = self.embedding[tokens]
        x = exact.rms_norm(residual, self.ones, 1e-6)
        for layer in self.layers:
            x = self._attention(layer, x, positions, ends)
            x, residual = exact.add_rms_norm(x, residual, self.ones, 1e-6)
            x, residual = exact.add_rms_norm(self._experts(layer, x), residual, self.ones, 1e-6)
        return exact.log_softmax(exact.linear(x, self.embedding).float() / 0.7)

    def _attention(
        self, layer: dict[str, torch.Tensor], x: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        heads = exact.linear(x, layer["qkv"]).view(len(x), -1, WIDTH)
        query, key, value = heads.split([HEADS, GROUPS, GROUPS], dim=1)
        query, key = exact.rope(query, key, self.table, positions)
        out = exact.attention(query, key, value, ends, WIDTH**-0.5)
        return exact.linear(out.flatten(1), layer["out"], leaves=2)

    @staticmethod
    def _experts(layer: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        weights, ids = exact.route(exact.linear(x, layer["gate"], dtype=torch.float32), CHOSEN)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        inner = exact.silu_and_mul(exact.grouped_linear(x[order // CHOSEN], layer["up"], counts))
        sorted_out = exact.grouped_linear(inner, layer["down"], counts, 2)
        out = torch.empty_like(sorted_out).index_copy(0, order, sorted_out)
        return exact.moe_combine(out.view(len(x), CHOSEN, -1), weights)


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    """Returns the tokens of each sequence."""
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=dice) for n in lengths]


def packed(parts: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Returns concatenated sequences and their bounds."""
    ends = torch.tensor([0, *(len(tokens) for tokens in parts)]).cumsum(0)
    return torch.cat(parts), ends.tolist()
