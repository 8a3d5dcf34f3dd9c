"""The form of a policy's weights: how they and any additional parameters are trained, exported, published and served.

    WeightForm      of a run       parts of publications; `attach` on a trainer rank, `served` for engines
    AttachedForm    of a rank      additional parameters, and the tensors that are packed
    ServedForm      of a server    arguments, hooks and attestation

These three are the plain form: every weight is trained and published unchanged. Other forms are entry points of the
group `slimx.weight_forms`: subclasses of `WeightForm`. Drivers and engine actors run without torch, so methods import
what they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slimx import entry_points
from slimx.json_types import Json

if TYPE_CHECKING:
    import numpy as np
    import torch

    from slimx.config.schema import Config
    from slimx.layout.parts import Part
    from slimx.layout.ranks import Sizes
    from slimx.layout.table import Table

GROUP = "slimx.weight_forms"

Tensors = Mapping[str, "torch.Tensor"]
"""Tensors by parameter name."""


class DerivedTensors:
    """Tensors that a rank derives when it packs a bucket and that replace parameters; none in this form."""

    def places(self, bucket: int) -> Tensors:
        """Returns the buffers that `make` writes for `bucket`, the same memory in every call."""
        return {}

    def make(self, bucket: int, moves: np.ndarray) -> None:
        """Computes the tensors that `moves` of `bucket` read."""


class AttachedForm:
    """The weights of one trainer rank in the plain form, without additional parameters."""

    keeps_base: ClassVar[bool] = False
    """True if updates never change the weights themselves: without the additional parameters they are the reference
    model."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the additional parameters, by a description for messages."""
        return {}

    # `plan` is Any because rooms above this one define its class.
    def leaving(self, name: str, plan: Any, rank: int, weights: Tensors) -> tuple[Tensors, DerivedTensors]:
        """Returns the tensors that `rank` packs according to `plan` (`slimx.reshard.plan.copy_plan.Plan`), and those
        that it derives.

        `name`: "publish", "adapters" or "export"; `weights`: those of the rank."""
        return weights, DerivedTensors()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Makes the model compute with its weights alone."""
        yield


@dataclass(frozen=True, slots=True)
class ServedForm:
    """The plain weight form in an engine's server: the weights alone, without additional parameters."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies with a slot in addition to the weights; requests name one if there are several."""
        return ()

    def server_arguments(self, device: str) -> Json:
        """Returns SGLang's arguments for a server on `device`."""
        return {}

    def command_line(self) -> list[str]:
        """Returns the options of `slimx.engines.server.launch`."""
        return []

    def contract(self) -> Json | None:
        """Returns the state that each rank of the server must attest; None: nothing."""
        return None

    def check_request(self, request: object) -> None:
        """Raises ValueError for a request that the server cannot answer; SGLang responds with status 400."""

    def register(self, registry: object, kinds: object) -> None:
        """Registers hooks with SGLang's HookRegistry (`kinds`: its HookType)."""

    def attest(self, runner: object) -> Json | None:
        """Returns the `contract` that a rank with this ModelRunner fulfils."""
        return None


class WeightForm:
    """The plain form in a run."""

    OPTION: ClassVar[str | None] = None
    """Option of a server's command line, with one argument, that selects this form."""

    @classmethod
    def configured(cls, config: Config) -> WeightForm | None:
        """Returns the form of a run if its configuration selects this one."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> ServedForm:
        """Returns the form of a server from the argument of `OPTION`. Raises ValueError."""
        return ServedForm()

    def published_parts(self, table: Table, sizes: Sizes) -> tuple[Sequence[Part], Sequence[Part]]:
        """Returns the parts that trainers of `sizes` publish in addition to the weights of `table`, and those that
        engines load."""
        return (), ()

    def attach(self, module: torch.nn.Module, table: Table) -> AttachedForm:
        """Attaches the form to the first chunk of a rank's model, before it is wrapped for data parallelism."""
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
    """Returns the form on the command line of `slimx.engines.server.launch`. Children of a server have the same
    `sys.argv`."""
    return entry_points.by_option(GROUP, argv) or ServedForm()
