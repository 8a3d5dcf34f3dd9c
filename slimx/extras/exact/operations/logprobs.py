"""Log-probabilities of exact mode."""

from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Computes (z - max z) - log(sum(exp(z - max z))) of logits z in fp32.

    Logits [rows, vocabulary] of any dtype, scaled -> fp32 of the same shape.
    """
    return _LogSoftmax.apply(logits)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities of tokens [rows] alone, fp32 [rows]: `log_softmax` without its full result."""
    return _TokenLogprobs.apply(logits, tokens)


def _normalizer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns max z and log(sum(exp(z - max z))), each [rows] fp32."""
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
