"""Log-probabilities of exact mode."""

from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on


def log_softmax(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Log-softmax of logits / temperature in fp32: logits [rows, vocabulary] of any dtype -> fp32 of the same shape.

    `temperature`: one number, or [rows]. With z = logits / temperature it is (z - max z) - log(sum(exp(z - max z))).
    """
    return _LogSoftmax.apply(logits, _temperatures(logits, temperature))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Log-probabilities of tokens [rows] alone, fp32 [rows]: `log_softmax` without its whole result."""
    return _TokenLogprobs.apply(logits, tokens, _temperatures(logits, temperature))


def _temperatures(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        return temperature.to(device=logits.device, dtype=torch.float32).reshape(-1).expand(len(logits)).contiguous()
    return torch.full((len(logits),), temperature, dtype=torch.float32, device=logits.device)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        most, log_sum = forward_on(logits.device).log_normaliser(logits.contiguous(), temperature)
        out = (logits.float() / temperature[:, None]).sub_(most[:, None]).sub_(log_sum[:, None])
        ctx.save_for_backward(out, temperature)
        ctx.dtype = logits.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        out, temperature = ctx.saved_tensors
        inner = out.exp().mul_(-gradient.sum(1, keepdim=True)).add_(gradient)
        return inner.div_(temperature[:, None]).to(ctx.dtype), None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        most, log_sum = forward_on(logits.device).log_normaliser(logits.contiguous(), temperature)
        ctx.save_for_backward(logits, tokens, temperature, most, log_sum)
        own = logits.gather(1, tokens[:, None].long())[:, 0].float()
        return (own / temperature - most) - log_sum

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        logits, tokens, temperature, most, log_sum = ctx.saved_tensors
        share = (logits.float() / temperature[:, None]).sub_((most + log_sum)[:, None]).exp_()
        inner = share.mul_((-gradient / temperature)[:, None])
        inner.scatter_add_(1, tokens[:, None].long(), (gradient / temperature)[:, None])
        return inner.to(logits.dtype), None, None
