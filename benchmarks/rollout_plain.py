"""The same work in plain Python, as training scripts do it without slimx: a sample is a record of lists, groups are
filtered, rewards normalized with torch, samples dealt out to ranks by length and packed into micro-batches by first
fit.

It follows the shape of slime's path (slime/rollout/sglang_rollout.py, slime/ray/rollout.py): lists until the trainer
makes tensors of them, no versions per token, no spans, no routes, no checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rollout_stand import PROMPT_TOKENS, Answers

from slimx.data.records import Prompt


@dataclass(slots=True)
class Sample:
    """One sampled answer."""

    number: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    reward: float = 0.0


class PlainPath:
    """Makes batches from the prompts in order."""

    def __init__(self, answers: Answers, prompts: Sequence[Prompt], *, per_step: int, size: int):
        self.answers, self.prompts, self.per_step, self.size = answers, prompts, per_step, size
        self._next = 0

    async def step(self, ranks: int, max_tokens: int) -> tuple[list[list[dict[str, Any]]], torch.Tensor]:
        """Returns the micro-batches by rank, and the advantages of all samples in order."""
        groups: list[list[Sample]] = []
        while len(groups) < self.per_step:
            numbers = range(self._next, self._next + self.per_step - len(groups))
            self._next = numbers.stop
            made = await asyncio.gather(*(self._group(number % len(self.prompts)) for number in numbers))
            groups += [group for group in made if len({sample.reward for sample in group}) > 1]
        samples = [sample for group in groups for sample in group]
        rewards = torch.tensor([sample.reward for sample in samples]).view(-1, self.size)
        centered = rewards - rewards.mean(1, keepdim=True)
        advantages = (centered / (centered.pow(2).sum(1, keepdim=True).div(self.size - 1).sqrt() + 1e-6)).flatten()
        return self._pack(samples, advantages, ranks, max_tokens), advantages

    async def _group(self, number: int) -> list[Sample]:
        return list(await asyncio.gather(*(self._sample(number, index) for index in range(self.size))))

    async def _sample(self, number: int, index: int) -> Sample:
        await asyncio.sleep(0)
        sampled = self.answers.meta(number, index)["output_token_logprobs"]
        sample = Sample(number, index)
        sample.tokens = list(self.prompts[number].token_ids) + [entry[1] for entry in sampled]
        sample.logprobs = [entry[0] for entry in sampled]
        sample.loss_mask = [1] * len(sampled)
        sample.reward = self.prompts[number].metadata["rewards"][index]
        return sample

    def _pack(
        self, samples: Sequence[Sample], advantages: torch.Tensor, ranks: int, max_tokens: int
    ) -> list[list[dict[str, Any]]]:
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens))
        shards: list[list[int]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for i in order:
            rank = loads.index(min(loads))
            shards[rank].append(i)
            loads[rank] += len(samples[i].tokens)
        return [
            [self._tensors(samples, advantages, part) for part in self._fit(samples, s, max_tokens)] for s in shards
        ]

    def _fit(self, samples: Sequence[Sample], shard: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Packs samples into micro-batches by first fit."""
        parts: list[list[int]] = []
        rooms: list[int] = []
        for i in shard:
            length = len(samples[i].tokens)
            place = next((n for n, room in enumerate(rooms) if room >= length), None)
            if place is None:
                parts.append([i])
                rooms.append(max_tokens - length)
            else:
                parts[place].append(i)
                rooms[place] -= length
        return parts

    def _tensors(self, samples: Sequence[Sample], advantages: torch.Tensor, part: Sequence[int]) -> dict[str, Any]:
        lengths = [len(samples[i].tokens) for i in part]
        return {
            "tokens": torch.cat([torch.tensor(samples[i].tokens) for i in part]),
            "loss_mask": torch.cat([torch.tensor([0] * PROMPT_TOKENS + samples[i].loss_mask) for i in part]),
            "logprobs": torch.cat([torch.tensor([0.0] * PROMPT_TOKENS + samples[i].logprobs) for i in part]),
            "advantages": torch.cat([advantages[i].expand(n) for i, n in zip(part, lengths, strict=True)]),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        }
