"""Log-probs of exact mode."""

from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Computes the log-softmax of `logits` [rows, vocabulary] in fp32: (z - max z) - log(sum(exp(z - max z))) for each
    row z.

    `logits`: any dtype, already divided by the temperature.
    """
    return _LogSoftmax.apply(logits)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-prob of one token per row, fp32 [rows]. The value is the same as in `log_softmax`, but those of
    all other tokens are not computed. `logits`: as in `log_softmax`; `tokens`: token ids [rows]."""
    return _TokenLogprobs.apply(logits, tokens)


def _normalizer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two terms that log-softmax subtracts from logits z, max z and log(sum(exp(z - max z))), each fp32
    [rows]."""
    temperature = torch.ones(len(logits), device=logits.device)
    return forward_on(logits.device).log_normalizer(logits.contiguous(), temperature)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        most, log_sum = _normalizer(logits)
        out = (logits.float() - most[:, None]).sub_(log_sum[:, None])
        ctx.save_for_backward(out)
        ctx.dtype = logits.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return out.exp().mul_(-gradient.sum(1, keepdim=True)).add_(gradient).to(ctx.dtype)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        most, log_sum = _normalizer(logits)
        ctx.save_for_backward(logits, tokens, most, log_sum)
        logit = logits.gather(1, tokens[:, None].long())[:, 0].float()
        return (logit - most) - log_sum

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        logits, tokens, most, log_sum = ctx.saved_tensors
        inner = (logits.float() - (most + log_sum)[:, None]).exp_().mul_(-gradient[:, None])
        return inner.scatter_add_(1, tokens[:, None].long(), gradient[:, None]).to(logits.dtype), None
