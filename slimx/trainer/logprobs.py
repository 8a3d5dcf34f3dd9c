"""Log-probs of labels from vocabulary-parallel logits."""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def label_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log softmax(logits / temperature)[label] in fp32, with gradient.

    logits [T, vocab / TP], labels [T], temperature [T]; returns [T]. The engine divides its logits the same way before
    it samples, so that both sides speak of the same distribution.
    """
    scaled = logits.float() / temperature.unsqueeze(1)
    return -vocab_parallel_cross_entropy(scaled, labels)
