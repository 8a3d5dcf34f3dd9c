"""Weight forms: how a policy's weights, and parameters added to them such as LoRA adapters, are trained and published.

    WeightForm      of a run       selects the form and lists the additional tensors that are published
    AttachedForm    of a rank      has the additional parameters, and provides the tensors that are packed
    ServedForm      of a server    provides arguments, hooks and the attested state of an engine

These three classes are the plain form: every weight is trained and published unchanged. A package adds another form by
subclasses, registering its `WeightForm` as an entry point of the group `slimx.weight_forms`. Drivers and engine actors
run without torch, so methods import what they need."""

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
"""Parameter name -> tensor."""


class DerivedTensors:
    """Tensors that a rank computes before it packs a bucket, and packs in place of the parameters with the same names.

    The plain form has none."""

    def places(self, bucket: int) -> Tensors:
        """Returns the buffers into which `make` writes the tensors of `bucket`, by parameter name. Every call returns
        the same memory."""
        return {}

    def make(self, bucket: int, moves: np.ndarray) -> None:
        """Computes the tensors that `moves`, a subset of the moves of `bucket`, read, and writes them into the bucket's
        buffers."""


class AttachedForm:
    """Parameters that a weight form adds to the model on one trainer rank, such as LoRA adapters, and the tensors that
    the rank packs. This base class is the plain form, which adds no parameters."""

    keeps_base: ClassVar[bool] = False
    """True if only the parameters that the form adds are trained. The model without them then serves as the reference
    model."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that this form adds to the model's; the keys are names for use in messages."""
        return {}

    # `plan` is Any because a package that imports this one defines its class.
    def leaving(self, name: str, plan: Any, rank: int, weights: Tensors) -> tuple[Tensors, DerivedTensors]:
        """Returns the tensors that `rank` packs according to `plan` (a `slimx.reshard.plan.copy_plan.Plan`), and the
        `DerivedTensors` object that computes replacements for some of them just before packing.

        `name`: purpose of the plan, one of "publish", "adapters" and "export". `weights`: the rank's parameters by
        name."""
        return weights, DerivedTensors()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Excludes the parameters that this form adds from the model's computation within the `with` block."""
        yield


@dataclass(frozen=True, slots=True)
class ServedForm:
    """Form in which an engine's server stores its weights, such as a base with LoRA adapters. This base class is the
    plain form: the model's parameters and no others."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies for which this server stores the parameters that the form adds, with one slot per
        policy. If there are several, a request must name its policy."""
        return ()

    def server_arguments(self, device: str) -> Json:
        """Returns the SGLang arguments that this form adds for a server on `device`."""
        return {}

    def command_line(self) -> list[str]:
        """Returns the command-line options that make `slimx.engines.server.launch` select this form."""
        return []

    def contract(self) -> Json | None:
        """Returns the state of the parameters added by this form that each rank of the server must report when it
        attests; None if the form adds none."""
        return None

    def check_request(self, request: object) -> None:
        """Raises ValueError for a request that the server cannot answer; SGLang then responds with status 400."""

    def register(self, registry: object, kinds: object) -> None:
        """Registers this form's hooks in SGLang's HookRegistry `registry`. `kinds`: SGLang's HookType."""

    def attest(self, runner: object) -> Json | None:
        """Returns the state of the parameters added by this form on the rank whose SGLang ModelRunner is `runner`, for
        comparison with `contract`; None if the form adds none."""
        return None


class WeightForm:
    """Form in which a run trains and publishes the policy's weights, for example with LoRA adapters. This base class is
    the plain form: all weights are trained and published unchanged."""

    OPTION: ClassVar[str | None] = None
    """Command-line option of a server that selects this form and takes one argument; None if there is no option."""

    @classmethod
    def configured(cls, config: Config) -> WeightForm | None:
        """Returns a form with the settings in `config` if `config` selects this kind of form, else None."""
        return cls()

    @classmethod
    def parse(cls, argument: str) -> ServedForm:
        """Returns the server's weight form that `argument`, the value of the command-line option `OPTION`, describes.
        Raises ValueError if the value is invalid."""
        return ServedForm()

    def published_parts(self, table: Table, sizes: Sizes) -> tuple[Sequence[Part], Sequence[Part]]:
        """Returns the tensors that this form adds to those of a model with the weight table `table`: first as trainers
        of `sizes` publish them, then as engines load them."""
        return (), ()

    def attach(self, module: torch.nn.Module, table: Table) -> AttachedForm:
        """Adds the form's parameters to `module`, the first model chunk of a rank, before it is wrapped for data
        parallelism."""
        return AttachedForm()

    def served(self) -> ServedForm:
        """Returns the form in which this policy's engines store their weights."""
        return ServedForm()


def form_of(config: Config) -> WeightForm:
    """Returns the weight form that `config`, the configuration of one policy, selects; the plain form if it selects no
    other."""
    for kind in entry_points.load_all(GROUP).values():
        form = kind.configured(config)
        if form is not None:
            return form
    return WeightForm()


def server_form(argv: Sequence[str]) -> ServedForm:
    """Returns the weight form that `argv`, a command line of `slimx.engines.server.launch`, selects; the plain form if
    no option selects another. A server's child processes can pass their `sys.argv`, which equals the server's."""
    return entry_points.by_option(GROUP, argv) or ServedForm()
