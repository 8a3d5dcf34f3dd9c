"""Checkpoints and exports of a run in progress, written and loaded by the run's ranks; saves may be asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from slimx.config.sections.policies import ACTOR
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.layout.ranks import Sizes
from slimx.observability.tracking.phases import Timeline
from slimx.orchestration.ranks.critic import CriticGroup
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.state.resume import layout_of, trainer_state
from slimx.orchestration.state.saves import RunState, Saves, relaid
from slimx.runtime.tasks import cancelled, in_thread
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import FileRecord

STOP_S = 10.0
"""Maximum number of seconds that a stopping run waits for an unfinished save to complete."""
CRITIC = "critic"
"""Subdirectory of a checkpoint that contains the critic's files."""
_POLL_S = 0.1
_PORTION = 8 * 2**30
"""Approximate number of bytes that a rank verifies in one call, after which progress is reported."""


class Checkpointer:
    """Makes the ranks of a run in progress save, load and export its state; `Saves` manages the directories. At most
    one save is in progress at a time; the next one waits for it."""

    def __init__(
        self,
        policies: Mapping[str, TrainerGroup],
        saves: Saves,
        timeline: Timeline,
        note: Callable[[str], None],
        critic: CriticGroup | None = None,
    ):
        self.policies = policies
        self.saves = saves
        self.critic = critic
        self.config = policies[ACTOR].config
        self.sizes = {name: trainers.sizes for name, trainers in policies.items()}
        self._parts = {part_of(name): (trainers.name, trainers.sizes.world) for name, trainers in policies.items()}
        """For each folder of the checkpoint that ranks write: the name of their rank group, and the number of its
        ranks."""
        if critic is not None:
            self._parts[CRITIC] = (critic.ranks.name, critic.sizes.world)
        self.timeline = timeline
        self.note = note
        self.on_failure: Callable[[SlimxError], None] = lambda error: None
        """Function that is called with the error as soon as an asynchronous save fails."""
        self.on_saved: Callable[[int, Path], None] = lambda step, path: None
        """Function that is called with step and directory of each checkpoint when the checkpoint is complete."""
        self._writing: asyncio.Task[None] | None = None
        self._unwritten: tuple[int, dict[str, bytes]] | None = None
        """Step and driver's files of a save that is in progress or interrupted, kept so that replacement ranks can
        repeat the save; None if there is none."""
        self._committing = False
        self.saved_step = -1
        """Step of the newest checkpoint that this process wrote or resumed from; -1 if there is none."""
        self._saved_at = time.monotonic()

    # Saving -----------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Returns True if a checkpoint is due after `step` steps: every `checkpoint.every` steps, or when
        `checkpoint.every_seconds` seconds have passed since the last checkpoint."""
        options = self.config.checkpoint
        late = options.every_seconds is not None and time.monotonic() - self._saved_at >= options.every_seconds
        return late or (options.every > 0 and step > 0 and step % options.every == 0)

    def state(self, step: int, version: int, rollouts: Json) -> RunState:
        """Returns the state of the run after `step` steps. `version`: version of the engines' weights. `rollouts`:
        state of the rollout manager or the replay."""
        return RunState(
            step=step,
            version=version,
            policies={name: trainer_state(group.config, self.sizes[name]) for name, group in self.policies.items()},
            critic=layout_of(self.critic.sizes) if self.critic is not None else None,
            rollouts=rollouts,
        )

    async def save(self, state: RunState) -> None:
        """Writes a checkpoint of `state` and of the trainers' current state. Returns when both states may be changed
        again.

        With `checkpoint.asynchronous` the files are written in the background, and `check` and `settle` raise the error
        of a failed save."""
        await self.settle()
        partial = await self._begin(state.step)
        # Serialized first, because groups continue to arrive while the files are written.
        driver_files = await in_thread(state.files)
        for name, trainers in self.policies.items():
            await trainers.save(partial / part_of(name), step=state.step)
        if self.critic is not None:
            await self.critic.ranks.save(partial / CRITIC, step=state.step, role="critic")
        self._await_files(partial, state.step, driver_files)
        if not self.config.checkpoint.asynchronous:
            await self.settle()
        self.saved_step = state.step
        self._saved_at = time.monotonic()

    async def _begin(self, step: int) -> Path:
        try:
            return await in_thread(self.saves.begin, step, list(self._parts))
        except OSError as error:
            raise files.write_error(self.saves.directory, "the driver", str(error)) from error

    def _await_files(self, partial: Path, step: int, driver_files: dict[str, bytes]) -> None:
        self._unwritten = step, driver_files
        self._writing = asyncio.create_task(self._write(partial, step, driver_files))
        self._writing.add_done_callback(self._written)

    @property
    def unwritten_step(self) -> int | None:
        """Step of the save that is in progress or interrupted; None if there is none."""
        return None if self._unwritten is None else self._unwritten[0]

    def resize(self, sizes: Sizes) -> None:
        """Changes the parallel sizes of the actor's ranks to `sizes`, for later saves and for an interrupted save that
        is repeated."""
        self.sizes[ACTOR] = sizes
        self._parts["."] = self.policies[ACTOR].name, sizes.world
        if self._unwritten is not None:
            step, driver_files = self._unwritten
            self._unwritten = step, relaid(driver_files, ACTOR, layout_of(sizes))

    async def interrupt(self) -> None:
        """Stops waiting for files of ranks that have ended; `write_again` makes new ranks write these files. If all
        files exist already and the checkpoint is being completed, waits for the completion."""
        writing = self._writing
        if writing is None:
            return
        if self._committing:
            await asyncio.wait([writing])
        elif not writing.done():
            self._writing = None
            await cancelled(writing)

    async def write_again(self, trainers: TrainerGroup, step: int) -> None:
        """Repeats the interrupted save with `trainers`, which have the state after `step` steps; does nothing if no
        save was interrupted, or if that save was for another step."""
        if self._writing is None and self._unwritten is not None and self._unwritten[0] == step:
            partial = await self._begin(step)
            await trainers.save(partial, step=step)
            self._await_files(partial, *self._unwritten)

    def _written(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SlimxError):
            self.on_failure(error)

    def check(self) -> None:
        """Raises the error of an asynchronous save that has failed. Does not wait for a save in progress."""
        if self._writing is not None and self._writing.done():
            done = self._writing
            self._writing = None
            self._unwritten = None
            done.result()

    async def settle(self) -> None:
        """Waits until no save is in progress. Raises the error of a failed save."""
        while self._unwritten is not None:
            if self._writing is None:  # new ranks will write it; their replacement has deadlines
                await asyncio.sleep(_POLL_S)
            else:
                await asyncio.wait([self._writing])
                self.check()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Waits up to `grace_s` seconds for a save in progress, and then abandons it. Does not raise."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=grace_s)
            self._writing.cancel()
            with suppress(asyncio.CancelledError, SlimxError, OSError):
                await self._writing
            self._writing = None
        self._unwritten = None

    async def _write(self, partial: Path, step: int, driver_files: dict[str, bytes]) -> None:
        with self.timeline.phase("checkpoint", track="checkpoint"):
            end = asyncio.get_running_loop().time() + self.config.checkpoint.deadline
            try:
                for part, (holder, world) in self._parts.items():
                    await self._reported(partial / part, holder, world, end)
                self._committing = True
                path = await in_thread(self._commit, partial, driver_files)
            except OSError as error:
                raise files.write_error(partial, "the driver", str(error)) from error
            finally:
                self._committing = False
        self.on_saved(step, path)
        self.note(f"checkpoint {path}")

    async def _reported(self, directory: Path, holder: str, world: int, end: float) -> None:
        """Waits until all `world` ranks of the group `holder` have written their reports in `directory`. Raises
        DeadlineError if reports are missing at `end`, a time on the event loop's clock."""
        while missing := await in_thread(files.unreported, directory, range(world), holder):
            if asyncio.get_running_loop().time() > end:
                late = ", ".join(f"{holder} rank {rank}" for rank in missing)
                raise DeadlineError(f"the files of {directory}", self.config.checkpoint.deadline, late)
            await asyncio.sleep(_POLL_S)

    def _commit(self, partial: Path, driver_files: dict[str, bytes]) -> Path:
        written: dict[str, FileRecord] = {}
        for part, (_, world) in self._parts.items():
            for rank in range(world):
                report = files.read_report(partial / part, rank)
                for name, record in report.files.items():
                    written[str(Path(part, name))] = record
        return self.saves.commit(partial, driver_files, written)

    # Loading ----------------------------------------------------------------------------------------------------------

    async def restore(self, path: Path, state: RunState) -> None:
        """Loads the trainers' state from the checkpoint `path`, which `check_resume` has accepted."""
        options = self.config.checkpoint
        if options.verify == "full":
            await self._verify(path)
        moments = options.load_optimizer
        for name, trainers in self.policies.items():
            same = state.policies[name]["layout"] == layout_of(self.sizes[name])
            await trainers.restore(path / part_of(name), same_layout=same, load_optimizer=moments)
        if self.critic is not None:
            same = state.critic == layout_of(self.critic.sizes)
            ranks = self.critic.ranks
            await ranks.restore(path / CRITIC, same_layout=same, load_optimizer=moments, role="critic")
        if not options.load_optimizer:
            self.note(
                f"checkpoint.load_optimizer is false, so only weights are loaded from {path}, and the optimizer's "
                "moments start at zero"
            )
        self.saved_step = state.step

    async def _verify(self, path: Path) -> None:
        """Compares all bytes of the checkpoint with the digests that the save recorded. The ranks read different files
        in parallel."""
        records = files.read_manifest(path)
        total = sum(record.size for record in records.values())
        done = 0
        trainers = self.policies[ACTOR]
        for parts in _portions(records, trainers.sizes.world):
            await trainers.check_files(path, [files.encode_records(part) for part in parts])
            for part in parts:
                done += sum(record.size for record in part.values())
            if total > _PORTION:
                self.note(f"verified {done / 2**30:.0f} of {total / 2**30:.0f} GiB of {path}")

    # Exports ----------------------------------------------------------------------------------------------------------

    async def export(self, target: Path) -> None:
        """Exports the current weights of the actor as the Hugging Face directory `target`, and the weights of other
        policies into the folders policies/NAME of `target`. `target` is either complete or missing, even after a
        crash."""
        partial = self.saves.begin_export(target)
        for name, trainers in self.policies.items():
            directory = partial / part_of(name)
            await in_thread(directory.mkdir, parents=True, exist_ok=True)
            await trainers.export(directory)
        await in_thread(self.saves.commit_export, partial, target)
        self.note(f"weights {target}")


def _portions(records: dict[str, FileRecord], ranks: int) -> Iterator[list[dict[str, FileRecord]]]:
    """Divides files among ranks for verification in rounds: yields, for each round, one list of files of about
    `_PORTION` bytes for each of `ranks` ranks. Files are assigned to ranks in order of decreasing size, each to the
    rank with the fewest bytes so far."""
    remaining: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(records, key=lambda name: (-records[name].size, name)):
        rank = load.index(min(load))
        remaining[rank].append(name)
        load[rank] += records[name].size
    while any(remaining):
        portions: list[dict[str, FileRecord]] = []
        for names in remaining:
            portion: dict[str, FileRecord] = {}
            size = 0
            while names and size < _PORTION:
                name = names.pop(0)
                portion[name] = records[name]
                size += records[name].size
            portions.append(portion)
        yield portions


def part_of(policy: str) -> str:
    """Returns the folder of a policy's files in a checkpoint and in an export: "." for the actor."""
    return "." if policy == ACTOR else f"policies/{policy}"
