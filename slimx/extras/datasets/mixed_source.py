"""Prompts from several sources, each with its share of every step's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slimx.config.sections.rollout import PromptSet
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt
from slimx.errors import SlimxError


class MixedSource:
    """Endless stream that draws the source of each prompt by weight, from (seed, number of the prompt).

    Each source goes through its own prompts as a `PromptSource` does. Weights by step follow the prompts that were
    taken, `per_step` for a step, so that timing decides nothing; a group that is dropped takes one more.
    """

    def __init__(self, sets: Sequence[PromptSet], prompts: Mapping[str, Sequence[Prompt]], seed: int, per_step: int):
        """`prompts`: those of each set, by its name."""
        self._sets, self._seed, self._per_step = {each.name: each for each in sets}, seed, per_step
        self._sources = {name: PromptSource(prompts[name], seed) for name in self._sets}
        self._taken = 0

    def next(self) -> Prompt:
        """The next prompt of the source that is drawn."""
        step = self._taken // self._per_step
        weights = np.cumsum([each.weight_at(step) for each in self._sets.values()])
        # Raw output of PCG64, because NumPy keeps it the same in every release.
        drawn = np.random.PCG64([self._seed, self._taken]).random_raw() / 2**64 * weights[-1]
        name = list(self._sets)[int(np.searchsorted(weights, drawn, side="right"))]
        self._taken += 1
        return self._sources[name].next()

    def state(self) -> dict[str, Any]:
        """Prompts `taken`, and the `state` of each source by name."""
        return {"taken": self._taken, "sources": {name: each.state() for name, each in self._sources.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the position of `state`. Weights may have changed since.

        Raises SlimxError if names, prompts or the seed did."""
        taken, saved = state.get("taken"), state.get("sources")
        if not isinstance(taken, int) or taken < 0 or not isinstance(saved, dict):
            raise SlimxError(
                "the saved state of the prompts is not that of several sources; restore rollout.prompts of the saved "
                "run, or start a new run",
                code="prompts.state",
                about="rollout.sources",
            )
        if changed := sorted(saved.keys() ^ self._sources.keys()):
            raise SlimxError(
                f"cannot continue in the saved order of prompts: source {changed[0]!r} is "
                f"{'new' if changed[0] in self._sources else 'gone'}; restore rollout.sources of the saved run (a "
                "weight of 0 turns one off), or start a new run",
                code="prompts.changed",
                about=changed[0],
            )
        for name, source in self._sources.items():
            try:
                source.restore(saved[name])
            except SlimxError as error:
                raise SlimxError(f"source {name!r}: {error}", code=error.code, about=error.about) from error
        self._taken = taken
