"""Ray actor of one trainer rank: adapts megatron-core, joins torch.distributed, and builds the rank's roles.

Both Ray's worker process and the driver import this module. Only `start` imports torch and megatron-core, after the
process is prepared for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slimx.config.schema import CHECKED, Config
from slimx.config.sections.general import Cluster
from slimx.json_types import Json
from slimx.numerics.mode import mode_of
from slimx.numerics.rounding import rounding_of
from slimx.runtime.logs import marked
from slimx.runtime.ports import address, free_port, is_loopback, local_address, machine
from slimx.trainer.process import install_adapters, prepare_process, redirect_output

if TYPE_CHECKING:
    from slimx.trainer.rank import TrainerRank


class TrainerWorker:
    """Ray actor for one trainer rank."""

    def __init__(self, number: int, config: Json, log_path: str, device: str, roles: Sequence[str]):
        """Redirects all output of the process to `log_path`; `start` performs the rest of the setup. `number`: number
        of the rank. `config`: a `Config` dumped to JSON values. `roles`: names of the roles to build, see
        `TrainerRank.build`."""
        redirect_output(log_path)
        self.number = number
        self.device = device
        self.roles = roles
        self._values = config
        self.rank: TrainerRank | None = None

    def ping(self) -> None:
        """Returns when all earlier calls of this actor are complete. Raises the error of a background save that could
        not be reported otherwise."""
        if self.rank is not None:
            self.rank.check_saves()

    def mark(self, text: str) -> None:
        """Writes a marker line to the log. `text`: the step and phase to which the following lines belong."""
        print(marked(f"rank {self.number}, {text}"), flush=True)

    def rendezvous(self) -> str:
        """Returns an address on this rank's node at which all ranks can meet, in the format of torch.distributed's
        init_method."""
        host = local_address(Cluster.model_validate(self._values["cluster"]).network)
        return f"tcp://{address(host, free_port(host))}"

    def start(self, init_method: str) -> Json:
        """Joins the other ranks, builds the roles, and loads the weights.

        Returns this rank's process id, its machine, the active adaptations of megatron-core, `NumericsMode.contract`,
        and the seconds that imports, the rendezvous and building the model took; on CUDA also the UUID of the GPU and
        the number of usable CPUs."""
        clock = [time.perf_counter()]
        config = Config.model_validate(self._values, context=CHECKED)
        deep_ep = config.trainer.moe.dispatcher == "flex"
        prepare_process(
            self.device,
            shares_layers=config.trainer.tensor * config.trainer.context > 1,
            local=is_loopback(urlsplit(init_method).hostname or ""),
            variables=rounding_of(config.trainer).VARIABLES,
            deep_ep=deep_ep,
            waiting=bool(config.trainer.offload_activations),
        )
        mode = mode_of(config)
        adapters = install_adapters(plain=mode.replaces_layers, deep_ep=deep_ep)
        from slimx.trainer.rank import TrainerRank

        rank = TrainerRank(config, self.number, self.device)
        self.rank = rank
        clock.append(time.perf_counter())
        rank.meet(init_method)
        clock.append(time.perf_counter())
        rank.build(self.roles)
        clock.append(time.perf_counter())
        durations = [late - early for early, late in pairwise(clock)]
        return {
            "pid": os.getpid(),
            "seconds": dict(zip(("imports", "rendezvous", "model"), durations, strict=True)),
            "machine": machine(),
            "adapters": adapters,
            "numerics": mode.contract(config.numerics.dtype, self.device),
            **rank.hardware,
        }

    def call(self, name: str, /, *arguments: object, **named: object) -> object:
        """Runs the operation `name` ("role.method") on this rank, which must have been started, and returns the
        operation's result."""
        assert self.rank is not None
        return self.rank.perform(name, *arguments, **named)

    def stop(self) -> None:
        """Leaves the rank's process groups."""
        if self.rank is not None:
            self.rank.leave()
