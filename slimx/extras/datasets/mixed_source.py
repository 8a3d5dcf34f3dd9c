"""Prompts from several sources, each of which provides a configured fraction of the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx.config.sections.rollout import PromptSet
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.json_types import Json


class MixedSource:
    """Endless stream of prompts from several sources. The source of each prompt is drawn by weight, with random numbers
    that depend only on the seed and the prompt's index.

    Each source yields its prompts as a `PromptSource` does. If weights change with the step, the step is computed from
    the number of prompts drawn so far, `per_step` per step, so timing has no influence. The prompt of a dropped group
    counts as drawn, because another prompt replaces it.
    """

    def __init__(self, sets: Sequence[PromptSet], prompts: Mapping[str, Sequence[Prompt]], seed: int, per_step: int):
        """Starts at the first prompt. `sets`: the sources with their weights; `prompts`: prompts of each source, by its
        name."""
        self._sets = {prompt_set.name: prompt_set for prompt_set in sets}
        self._seed = seed
        self._per_step = per_step
        self._sources = {name: PromptSource(prompts[name], seed) for name in self._sets}
        self._taken = 0

    def next(self) -> Prompt:
        """Draws a source, and returns its next prompt."""
        step = self._taken // self._per_step
        weights = np.cumsum([prompt_set.weight_at(step) for prompt_set in self._sets.values()])
        # Raw output of PCG64, which is the same in every release of NumPy.
        drawn = np.random.PCG64([self._seed, self._taken]).random_raw() / 2**64 * weights[-1]
        name = list(self._sets)[int(np.searchsorted(weights, drawn, side="right"))]
        self._taken += 1
        return self._sources[name].next()

    def state(self) -> Json:
        """Returns the position in the stream: the number of prompts `taken`, and the state of each source by name under
        `sources`."""
        return {"taken": self._taken, "sources": {name: source.state() for name, source in self._sources.items()}}

    def restore(self, state: Json) -> None:
        """Continues at the position in `state`. Weights may differ from those of the saved run.

        Raises SlimxError if the names of sources, their prompts or the seed have changed."""
        taken = state.get("taken")
        saved = state.get("sources")
        if not isinstance(taken, int) or taken < 0 or not isinstance(saved, dict):
            raise SlimxError(
                "this run uses rollout.sources, but the saved run took its prompts from rollout.prompts or "
                "rollout.source; use the same setting as the saved run, or start a new run",
                code="prompts.state",
                about="rollout.sources",
            )
        changed = sorted(saved.keys() ^ self._sources.keys())
        if changed:
            raise SlimxError(
                f"the saved order of prompts cannot be continued, because source {changed[0]!r} was "
                f"{'added to' if changed[0] in self._sources else 'removed from'} rollout.sources; list the same "
                "sources as in the saved run (a weight of 0 disables a source), or start a new run",
                code="prompts.changed",
                about=changed[0],
            )
        for name, source in self._sources.items():
            try:
                source.restore(saved[name])
            except SlimxError as error:
                raise SlimxError(f"source {name!r}: {error}", code=error.code, about=error.about) from error
        self._taken = taken
