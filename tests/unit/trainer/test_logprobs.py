"""Chunked log-probs and entropies against plain torch over whole logits. Tensor parallelism is in
tests/integration/test_forward_passes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimx.algorithms.inputs import TopLogprobs
from slimx.algorithms.losses.kl import DIRECTIONS
from slimx.data.sampling_support import Support
from slimx.trainer.model.logprobs import SMALLEST_CHUNK, KeptTokens, Targets, chunk_tokens, label_logprobs

TOKENS, WIDTH, VOCABULARY = 53, 24, 97
CHUNKS = (1, 7, 53, 64)


def problem(dtype: torch.dtype = torch.float32, *, restricted: bool = False):
    """Returns hidden states, weight, targets (every third position unrestricted) and two directions of gradient."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH) / 3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    support = None
    if restricted:
        random = np.random.default_rng(0)
        rows = []
        for position, label in enumerate(labels.tolist()):
            others = random.permutation([token for token in range(VOCABULARY) if token != label])
            rows.append([] if position % 3 == 0 else [label, *others[: random.integers(0, 9)]])
        support = Support(
            ids=np.array([token for row in rows for token in row], np.int32),
            counts=np.array([len(row) for row in rows], np.int32),
        )
    temperature = torch.rand(TOKENS) + 0.5
    return hidden, weight, labels, temperature, support, torch.randn(TOKENS), torch.randn(TOKENS)


def plain(hidden, weight, labels, temperature, support):
    """Returns log_softmax and entropy of whole logits, in the dtype of the inputs."""
    logits = (hidden @ weight.t()).float() if hidden.dtype != torch.float64 else hidden @ weight.t()
    logits = logits / temperature[:, None]
    if support is not None:
        kept = torch.zeros(logits.shape, dtype=torch.bool)
        kept[support.positions(), support.ids] = True
        kept[support.counts == 0] = True
        logits = logits.masked_fill(~kept, -torch.inf)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs.isinf(), 0.0)).sum(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], entropy


def chunked(hidden, weight, labels, temperature, support, chunk):
    kept = None if support is None else KeptTokens(support, hidden.device)
    targets = Targets(labels=labels, temperature=temperature, support=kept)
    return label_logprobs(hidden, weight, targets, group=None, chunk=chunk)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_and_gradients_are_those_of_whole_logits(chunk, restricted):
    """Against plain torch in fp32, and no further from fp64 than the rounding of fp32 logits explains."""
    hidden, weight, labels, temperature, support, up, sideways = problem(restricted=restricted)
    values = chunked(hidden, weight, labels, temperature, support, chunk)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    same, truth = ((hidden, weight), temperature, 1e-6), (exact, temperature.double(), 3e-6)
    for inputs, divisor, limit in (same, truth):
        outputs = plain(*inputs, labels, divisor, support)
        for found, expected in zip(values, outputs, strict=True):
            assert relative(found, expected) <= limit
        # Each output alone, then both: a loss without an entropy bonus gives no gradient for the entropy at all.
        for loss in (
            lambda v: (up * v[0]).sum(),
            lambda v: (sideways * v[1]).sum(),
            lambda v: (up * v[0] - sideways * v[1]).sum(),
        ):
            found = torch.autograd.grad(loss(values), (hidden, weight), retain_graph=True)
            expected = torch.autograd.grad(loss(outputs), inputs, retain_graph=True)
            assert max(relative(f, e) for f, e in zip(found, expected, strict=True)) <= limit


def top_of(top: int) -> torch.Tensor:
    """Returns different tokens at each position, int64 [T, top]."""
    return torch.stack([torch.randperm(VOCABULARY)[:top] for _ in range(TOKENS)])


def plain_top(hidden, weight, temperature, top):
    logprobs = ((hidden @ weight.t()) / temperature[:, None]).log_softmax(-1)
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter_(1, top, False)
    return logprobs.gather(1, top), logprobs.masked_fill(~others, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("chunk", (1, 7, 64))
def test_top_and_tail_log_probs_equal_those_of_whole_logits(chunk, together):
    """Alone, then together with the label's log-prob and the entropy, whose gradients come through the same logits."""
    hidden, weight, labels, temperature, _, up, sideways = problem()
    top = top_of(5)
    targets = Targets(labels=labels, temperature=temperature, top=top)
    values = label_logprobs(hidden, weight, targets, group=None, chunk=chunk)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = plain(*exact, labels, temperature.double(), None) + plain_top(*exact, temperature.double(), top)
    directions = [up, sideways, torch.randn(TOKENS, 5), torch.randn(TOKENS)]
    for found, expected in zip(values, truth, strict=True):
        assert relative(found, expected) <= 3e-6
    for chosen in ((0, 1, 2, 3),) if together else ((2,), (3,), (2, 3)):
        found, expected = (
            torch.autograd.grad(sum((directions[i] * outputs[i]).sum() for i in chosen), leaves, retain_graph=True)
            for outputs, leaves in ((values, (hidden, weight)), (truth, exact))
        )
        assert max(relative(f, e) for f, e in zip(found, expected, strict=True)) <= 3e-6


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_over_the_whole_vocabulary_the_kl_with_a_teacher_is_the_whole_kl(direction):
    """Value and gradients of hidden states and weight; over fewer tokens it is less, and never negative."""
    hidden, weight, labels, _, _, up, _ = problem()
    teacher = (2 * torch.randn(TOKENS, VOCABULARY)).log_softmax(-1)
    found, exact = {}, [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    for top in (1, 8, VOCABULARY):
        values, ids = teacher.topk(top)
        out = label_logprobs(hidden, weight, Targets(labels=labels, top=ids), group=None, chunk=16)
        found[top] = DIRECTIONS[direction](TopLogprobs(*out[2:], values))
    policy, other = (exact[0] @ exact[1].t()).log_softmax(-1), teacher.double()
    pair = (other, policy) if direction == "forward" else (policy, other)
    expected = (pair[0].exp() * (pair[0] - pair[1])).sum(-1)
    assert relative(found[VOCABULARY], expected) <= 1e-6
    weights = up.abs()
    gradients = torch.autograd.grad((weights * found[VOCABULARY]).sum(), (hidden, weight))
    for gradient, reference in zip(gradients, torch.autograd.grad((weights * expected).sum(), exact), strict=True):
        assert relative(gradient, reference) <= 1e-5
    assert (found[1] > 0).all() and (found[1] < found[8]).all() and (found[8] < expected).all()


def test_a_policy_without_tail_probability_has_finite_gradients():
    hidden, weight, labels, _, _, _, _ = problem()
    with torch.no_grad():
        weight[5:] = 0.0
        weight[:5] = hidden.new_ones(WIDTH)
        hidden.fill_(20.0)
    targets = Targets(labels=labels, top=torch.arange(5).expand(TOKENS, 5))
    *_, top, rest = label_logprobs(hidden, weight, targets, group=None, chunk=16)
    assert rest.isfinite().all() and rest.max() < -60
    loss = sum(kl(TopLogprobs(top, rest, torch.full((TOKENS, 5), -2.0))).sum() for kl in DIRECTIONS.values())
    assert all(part.isfinite().all() for part in torch.autograd.grad(loss, (hidden, weight)))


def test_in_bfloat16_chunks_are_as_near_to_the_truth_as_one_product():
    hidden, weight, labels, temperature, _, up, _ = problem(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = torch.autograd.grad((up * plain(*exact, labels, temperature.double(), None)[0]).sum(), exact)
    whole = torch.autograd.grad((up * plain(hidden, weight, labels, temperature, None)[0]).sum(), (hidden, weight))
    values = chunked(hidden, weight, labels, temperature, None, 8)
    assert [value.dtype for value in values] == [torch.float32] * 2
    parts = torch.autograd.grad((up * values[0]).sum(), (hidden, weight))
    for part, one, expected in zip(parts, whole, truth, strict=True):
        assert part.dtype == torch.bfloat16
        assert (part - expected).norm() <= 1.2 * (one - expected).norm()


def test_a_frozen_output_layer_gets_no_gradient_but_hidden_states_do():
    hidden, weight, labels, temperature, _, up, _ = problem()
    frozen = weight.detach()
    (found,) = torch.autograd.grad((up * chunked(hidden, frozen, labels, temperature, None, 16)[0]).sum(), hidden)
    (expected,) = torch.autograd.grad((up * plain(hidden, frozen, labels, temperature, None)[0]).sum(), hidden)
    assert relative(found, expected) <= 1e-6


def test_no_tensor_of_all_tokens_and_all_logits_is_made_in_either_pass():
    hidden, weight, labels, temperature, support, up, sideways = problem(restricted=True)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Largest():
        logprobs, entropy = chunked(hidden, weight, labels, temperature, support, 4)
        torch.autograd.backward((up * logprobs + sideways * entropy).sum())
    assert largest <= max(4 * VOCABULARY, WIDTH * VOCABULARY, TOKENS * WIDTH) < TOKENS * VOCABULARY


def test_a_single_kept_token_is_certain():
    hidden, weight, labels, temperature, _, _, _ = problem()
    only = Support(ids=labels.numpy().astype(np.int32), counts=np.ones(TOKENS, np.int32))
    logprobs, entropy = chunked(hidden, weight, labels, temperature, only, 16)
    assert not logprobs.any() and not entropy.any()
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    assert not gradient.any()


def test_the_automatic_chunk_is_bounded_in_bytes():
    assert chunk_tokens(300, 32768) == 300
    assert chunk_tokens(None, 32768) == 2048
    assert chunk_tokens(None, 2**24) == SMALLEST_CHUNK
