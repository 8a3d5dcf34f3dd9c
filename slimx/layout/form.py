"""The form of a policy's weights: how they are trained, exported, published and served, and what stands beside them.

    WeightForm      of a run       parts of publications; `attach` on a trainer rank, `served` for engines
    AttachedForm    of a rank      parameters beside the weights, and what leaves the rank
    ServedForm      of a server    arguments, hooks and attestation

These three are the plain form: every weight is trained, and leaves as it is. Another one is an entry point of the group
`slimx.weight_forms`: a class derived from `WeightForm`. Drivers and the actors of engines do without torch, so methods
import what they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slimx import entry_points

if TYPE_CHECKING:
    import numpy as np
    import torch

    from slimx.config.schema import Config
    from slimx.layout.parts import Part
    from slimx.layout.ranks import Sizes
    from slimx.layout.table import Table

GROUP = "slimx.weight_forms"

Tensors = Mapping[str, "torch.Tensor"]
"""By name of a parameter."""


class Made:
    """Tensors that a rank makes when it packs a bucket, and that are read in place of parameters: none."""

    def places(self, bucket: int) -> Tensors:
        """Returns where `make` writes those of `bucket`, always the same memory."""
        return {}

    def make(self, bucket: int, moves: np.ndarray) -> None:
        """Makes those that `moves` of `bucket` read."""


class AttachedForm:
    """The weights of one trainer rank in the plain form: nothing stands beside them."""

    keeps_base: ClassVar[bool] = False
    """True if no update moves the weights themselves: without what stands beside them they are the reference."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters beside the weights, by words for messages."""
        return {}

    def leaving(self, name: str, plan: Any, rank: int, weights: Tensors) -> tuple[Tensors, Made]:
        """Returns the tensors that `rank` packs by a `plan` (`slimx.reshard.plan.copy_plan.Plan`), and those that it
        makes for that. `name`: "publish", "adapters" or "export"; `weights`: those of the rank."""
        return weights, Made()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Has the model compute with its weights alone."""
        yield


@dataclass(frozen=True, slots=True)
class ServedForm:
    """The plain form in an engine's server: it computes with weights alone."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Returns the policies that have a slot beside the weights, which requests name where there are several."""
        return ()

    def server_arguments(self, device: str) -> dict[str, Any]:
        """Returns SGLang's arguments for a server on `device`."""
        return {}

    def command_line(self) -> list[str]:
        """Returns the options of `slimx.engines.server.launch`."""
        return []

    def contract(self) -> dict[str, Any] | None:
        """Returns what each rank of the server must attest; None: nothing."""
        return None

    def check_request(self, request: Any) -> None:
        """Raises ValueError for a request that the server cannot answer; SGLang answers with status 400."""

    def register(self, registry: Any, kinds: Any) -> None:
        """Registers hooks with SGLang's HookRegistry (`kinds`: its HookType)."""

    def attest(self, runner: Any) -> dict[str, Any] | None:
        """Returns the `contract` that a rank with this ModelRunner fulfils."""
        return None


class WeightForm:
    """The plain form in a run."""

    OPTION: ClassVar[str | None] = None
    """The option of a server's command line, with one argument, by which the server computes in this form."""

    @classmethod
    def configured(cls, config: Config) -> WeightForm | None:
        """Returns the form of a run, if this is the one that its configuration has."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> ServedForm:
        """Returns the form of a server from the argument of `OPTION`. Raises ValueError."""
        return ServedForm()

    def published_parts(self, table: Table, sizes: Sizes) -> tuple[Sequence[Part], Sequence[Part]]:
        """Returns what trainers of `sizes` publish beside the weights of `table`, and what engines take of it."""
        return (), ()

    def attach(self, module: torch.nn.Module, table: Table) -> AttachedForm:
        """Called with the first chunk of a rank's model before it is wrapped for data parallelism."""
        return AttachedForm()

    def served(self) -> ServedForm:
        """Returns the form of the policy's servers."""
        return ServedForm()


def form_of(config: Config) -> WeightForm:
    """Returns the form of the weights of a run's policy."""
    for kind in entry_points.load_all(GROUP).values():
        form = kind.configured(config)
        if form is not None:
            return form
    return WeightForm()


def server_form(argv: Sequence[str]) -> ServedForm:
    """Returns the form that the command line of `slimx.engines.server.launch` has. Children of a server have the same
    `sys.argv`."""
    return entry_points.by_option(GROUP, argv) or ServedForm()
