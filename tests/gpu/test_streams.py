"""A pack can be captured into a graph, and packs on two streams do not disturb each other."""

from __future__ import annotations

import torch

from slimx.reshard.kernels import cuda as kernel_cuda
from tests.gpu.plans import random_plan
from tests.gpu.running import OnDevice, on_cpu


def test_a_captured_pack_reads_what_its_sources_hold_when_it_is_replayed(device: torch.device) -> None:
    plan = random_plan(11, tensors=20)
    on_device = OnDevice(plan, device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream):
        on_device.clear()
        on_device.pack()
    expected = on_cpu(plan)
    memory = on_device.memory.clone()
    on_device.memory.zero_()  # the capture itself ran nothing
    graph.replay()
    assert (on_device.outcome().sums != expected.sums).any()
    on_device.memory.copy_(memory)
    for _ in range(3):
        graph.replay()
        on_device.outcome().must_equal(expected, plan.pieces)


def test_two_streams_at_once(device: torch.device) -> None:
    plans = [random_plan(seed, tensors=40, side=600) for seed in (12, 13)]
    copies = [OnDevice(plan, device) for plan in plans]
    expected = [on_cpu(plan) for plan in plans]
    streams = [torch.cuda.Stream(device) for _ in plans]
    for _ in range(5):
        for one in copies:
            one.clear()
        torch.cuda.synchronize()
        for one, stream in zip(copies, streams, strict=True):
            one.pack(stream)
        torch.cuda.synchronize()
        for one, right, plan in zip(copies, expected, plans, strict=True):
            one.outcome().must_equal(right, plan.pieces)


def test_a_pack_does_not_wait_for_the_device(device: torch.device) -> None:
    on_device = OnDevice(random_plan(14), device)
    on_device.pack()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(int(2e9))  # about a second of the stream's time
    on_device.clear()
    kernel_cuda.pack(on_device.plan, on_device.bucket, on_device.sums, on_device.flags)
    done.record()
    assert not done.query(), "the call returned after its work had ended"
    torch.cuda.synchronize()
