"""The GPU as NVML and torch see it is one and the same."""

from __future__ import annotations

import os

import pytest
import torch

pynvml = pytest.importorskip("pynvml")

from slimx.extras.alerts.machine.gpus import gpus_here, look_at  # noqa: E402
from slimx.trainer.device.gpu import check_health, gpu_of  # noqa: E402


def test_nvml_answers_for_torchs_device(device: torch.device):
    gpu = gpu_of(device)
    free, total = gpu.memory()
    assert 0 < free <= total
    assert abs(total - torch.cuda.get_device_properties(device).total_memory) < 0.1 * total
    block = torch.ones(2**28, device=device)  # 1 GiB
    torch.cuda.synchronize()
    assert free - gpu.memory()[0] >= 0.9 * block.nbytes
    assert gpu.cpus() <= set(range(os.cpu_count() or 1))
    assert all(gpu.uuid in warning for warning in check_health(gpu))


def test_alerts_read_the_temperature_of_each_gpu(device: torch.device):
    gpus = gpus_here()
    assert len(gpus) == pynvml.nvmlDeviceGetCount()
    assert all(10 < finding.value < 110 for finding in look_at(gpus))
