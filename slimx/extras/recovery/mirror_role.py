"""Operations of a trainer rank that send its state to a `MirrorStore` and restore the state from there (role
"mirror")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from slimx.extras.recovery.mirror import Mirror, read_back
from slimx.trainer.checkpoint.load import take_state
from slimx.trainer.checkpoint.state import local_state
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank

if TYPE_CHECKING:
    from slimx.trainer.trainer import PolicyTrainer


class MirrorRole:
    """Role of a trainer rank (`slimx.trainer.rank.Role`) that mirrors the state of the rank's model in another
    process."""

    def __init__(self, rank: TrainerRank):
        self.model = cast("PolicyTrainer", rank.roles["model"])
        self.mirror = Mirror(rank.number, rank.config.trainer.deadline)

    def reload(self, *, training: bool = True) -> None:
        self.model.reload(training=training)

    def offload(self, *, weights: bool = True) -> None:
        """Does nothing, because mirrors use no device memory."""

    @operation("mirror", needs="training")
    def send(self, store: Any, *, step: int) -> None:
        """Copies the state after `step` steps, and starts sending the copy to `store`, a `MirrorStore`."""
        self.mirror.send(store, step, self._state(loading=False))

    @operation("restore")
    def fetch(self, store: Any, *, step: int) -> None:
        """Reads from `store` the state that the lost rank with this rank's number sent after `step` steps."""
        self.mirror.fetch(store, step)

    @operation("restore", needs="training")
    def restore(self, *, step: int) -> None:
        """Restores the state after `step` steps, which `fetch` has read."""
        loaded = read_back(self.mirror.fetched(step), self._state(loading=True))
        take_state(loaded, self.model.chunks, self.model.optimizer)
        self.model.weights.changed()

    def _state(self, *, loading: bool) -> dict[str, Any]:
        frozen = bool(self.model.config.trainer.frozen)
        return local_state(self.model.chunks, self.model.optimizer, loading=loading, frozen=frozen)
