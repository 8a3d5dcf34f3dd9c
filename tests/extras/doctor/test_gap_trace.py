"""Where two sides part is found by the digests of rows that each of them notes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slimx.extras.doctor.gap import describe
from slimx.extras.doctor.row_digests import OUTPUT, attention_point, first_difference, mlp_point, row_digests
from slimx.extras.doctor.server_trace import Trace
from slimx.extras.doctor.trace_role import traced
from tests.refusals import numbers

POINTS = [point(layer) for layer in range(2) for point in (attention_point, mlp_point)] + [OUTPUT]


def test_the_first_part_that_differs_is_named() -> None:
    same = {point: ["a", "b", "c"] for point in POINTS}
    assert first_difference(same, same) is None
    parts = ("the embedding", "the attention of layer 0", "the MLP of layer 0", "the attention of layer 1")
    for number, part in enumerate((*parts, "the MLP of layer 1")):
        other = same | {point: ["a", "x", "y"] for point in POINTS[number:]}
        assert first_difference(same, other) == (part, 2 if number else 3)
    # An engine notes the token after which it stops too, for which the trainer has no label, and health checks.
    assert first_difference({point: ["a", "a", "b", "c", "d"] for point in POINTS}, same) is None


def test_a_digest_is_of_a_rows_bits() -> None:
    x = torch.arange(12.0).view(3, 1, 4)
    other = x.clone()
    other[1, 0, 2] = torch.nextafter(other[1, 0, 2], torch.tensor(9.0))
    assert [a == b for a, b in zip(row_digests(x), row_digests(other), strict=True)] == [True, False, True]
    assert row_digests(x.bfloat16()) == row_digests(x.bfloat16().squeeze(1))


class Norm(torch.nn.Module):
    """As SGLang's: with a residual it returns the sum as well."""

    def forward(self, x, residual=None):
        return 2 * x if residual is None else (2 * (x + residual), x + residual)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()


class Server(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers, self.model.norm = torch.nn.ModuleList([Layer(), Layer()]), Norm()

    def forward(self, x):
        residual, first = x, True
        for layer in self.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                x, residual = (norm(x), x) if first else norm(x, residual)
                x, first = x - 1, False
        return self.model.norm(x, residual)[0]


def test_both_sides_note_the_residual_stream_at_the_same_points() -> None:
    streams, x = [], torch.arange(6.0).view(3, 2)
    server = Server()
    trace = Trace(server)
    server(x[:2])
    server(x[2:])  # in two chunks
    noted = trace.end()
    server(x)
    assert sorted(noted) == sorted(POINTS) and all(len(rows) == 3 for rows in noted.values())
    assert trace.end() == noted, "nothing is noted after the end"

    stream = x
    for _ in POINTS:
        streams.append(stream)
        stream = stream + (2 * stream - 1)
    norms = [SimpleNamespace(input_layernorm=torch.nn.Identity(), pre_mlp_layernorm=torch.nn.Identity()) for _ in "ab"]
    for number, layer in enumerate(norms):
        layer.layer_number = number + 1
    model = SimpleNamespace(decoder=SimpleNamespace(layers=norms, final_layernorm=torch.nn.Identity()))
    with traced([model]) as rows:
        for number, layer in enumerate(norms):
            layer.input_layernorm(streams[2 * number])
            layer.pre_mlp_layernorm(streams[2 * number + 1])
        model.decoder.final_layernorm(streams[4])
    assert first_difference(noted, dict(rows)) is None


def test_a_log_prob_gap_is_reported_with_its_numbers() -> None:
    figures = {"gap/tokens": 1010.0, "gap/mean": 1.9e-3, "gap/max": 0.15, "routes/differing": 20.0}
    lines = describe(figures | {"gap/tokens_above_1e-5": 200.0, "gap/tokens_other_routes": 50.0})
    assert list(map(numbers, lines)) == [[1010, 0.0019, 0.15], [1e-5, 200, 19.8, 50, 25.0], [20]]
    none = {"gap/mean": 0.0, "gap/max": 0.0, "routes/differing": 0.0, "gap/tokens_above_1e-5": 0.0}
    assert list(map(numbers, describe(figures | none)[:2])) == [[1010, 0, 0], [1e-5, 0, 0.0]]
    (alone,) = describe(none | {"gap/tokens": 0.0})
    assert not numbers(alone), "nothing was compared"
