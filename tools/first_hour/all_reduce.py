"""One rank of an all-reduce over this machine: its bus bandwidth, and the memory that a communicator keeps.

    torchrun --nproc-per-node 8 -m tools.first_hour.all_reduce [--device cpu] [--mib 512]

Rank 0 prints one line. Bus bandwidth is bytes x 2 (n - 1) / n / seconds, as NCCL's own tests define it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

TIMES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=512)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if not dist.is_torchelastic_launched():
        parser.error("this is one rank of several: start them by torchrun, as --help shows")
    if cuda and not torch.cuda.is_available():
        parser.error("torch has no CUDA device: run this where a GPU is, or with --device cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(rank)
    data = torch.full((options.mib * 2**18,), float(rank + 1), device=options.device)
    before = free(cuda)
    dist.all_reduce(data)
    kept = before - free(cuda)
    if (found := data[-1].item()) != (expected := ranks * (ranks + 1) / 2):
        raise SystemExit(f"rank {rank}: the sum over {ranks} ranks is {found}, not {expected}")
    began = time.monotonic()
    for _ in range(TIMES):
        dist.all_reduce(data)
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / TIMES
    if rank == 0:
        rate = data.nbytes * 2 * (ranks - 1) / ranks / seconds / 1e9
        memory = f", {kept / 2**20:.0f} MiB of each GPU for its communicator" if cuda else ""
        print(f"{ranks} ranks, {options.mib} MiB: {rate:.1f} GB/s{memory}")
    dist.destroy_process_group()


def free(cuda: bool) -> int:
    """Returns the free bytes of this rank's GPU; 0 without CUDA."""
    if not cuda:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


if __name__ == "__main__":
    main()
