"""Another process with a GPU: it answers one JSON line for each that it reads. `Peer` is the tests' side of it.

A refusal's answer is its code, its object and its sentence.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.transports.device import DeviceMemory, fetch, opened
from tests.gpu.plans import random_plan
from tests.refusals import told

ROOT = Path(__file__).parents[2]


class Peer:
    """Starts the process; `gpus`: its CUDA_VISIBLE_DEVICES, this process's unless given."""

    def __init__(self, gpus: str | None = None):
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.sharing_peer"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, method: str, *arguments: Any) -> None:
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 90) -> Any:
        assert select.select([self.process.stdout], [], [], seconds)[0], "the peer did not answer"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with status {self.process.wait()}"
        return json.loads(line)

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class _Device:
    """What the process does when it is asked."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.kept: list[Any] = []

    def ready(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def allocate(self, size: int, value: int) -> str:
        self.kept.append(memory := DeviceMemory(size, self.device))
        memory.bytes.fill_(value)
        torch.cuda.synchronize()
        return memory.path

    def hold(self, path: str, size: int) -> str:
        """Open it and never close it."""
        self.kept.append(one := opened(path, size, self.device))
        one.__enter__()
        return "held"

    def checksum(self, path: str, start: int, stop: int) -> str:
        """Of a copy of these bytes."""
        return f"{kernel.checksum_tensor(fetch(path, start, stop, self.device).cpu()):016x}"

    def pack(self, path: str, seed: int) -> list[int]:
        """A random plan from this process's memory into another's; its sums."""
        plan = random_plan(seed, tensors=40)
        sources = torch.from_numpy(plan.memory).to(self.device)
        names = [f"tensor {number}" for number in range(plan.tensors)]
        pieces, size = plan.at(sources.data_ptr()), plan.bucket_bytes
        held = DevicePlan(pieces, bucket_bytes=size, names=names, bucket="shared", device=self.device)
        sums = torch.zeros(plan.tensors, dtype=torch.int64, device=self.device)
        flags = torch.zeros(plan.tensors, dtype=torch.int32, device=self.device)
        with opened(path, size, self.device) as address:
            kernel_cuda.pack_at(held, address, sums, flags)
            found = kernel_cuda.results(held, sums)
        return found.tolist()


def main() -> None:
    device = _Device()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            out = getattr(device, method)(*arguments)
        except SlimxError as error:
            out = told(error)
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
