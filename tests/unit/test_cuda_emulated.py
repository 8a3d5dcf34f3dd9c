"""The CUDA kernels' own source, run by emulated threads on the CPU, gives the CPU kernels' buckets, sums and flags.

So the tiling, every path, the checksums and the barriers are tested without a GPU (cuda_emulation/device.cuh says what
is not). `tests/gpu` runs the same plans on one.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard import kernel
from slimx.reshard.record import OP, RULE
from tests.gpu.plans import FORMS, Plan, random_plan

ROOT = Path(__file__).parents[2]
EMULATION = Path(__file__).with_name("cuda_emulation")
PATHS = 9
"""Of slimx::Path in csrc/tiles.cuh."""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of csrc/*.cuh compiled with the emulated device.cuh in place of theirs."""
    folder = tmp_path_factory.mktemp("emulator")
    for source in (*(ROOT / "csrc").glob("*.cuh"), *(ROOT / "csrc").glob("*.h"), *EMULATION.iterdir()):
        shutil.copy(source, folder)
    flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan"]
    library = folder / "emulator.so"
    compile_ = ["g++", *flags, *checks, "-shared", "-fPIC", str(folder / "emulator.cpp"), "-o", str(library)]
    done = subprocess.run(compile_, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def aligned(count: int, fill: int) -> np.ndarray:
    """Bytes [count] at an address that is a multiple of 64, as a GPU's allocations are."""
    memory = np.full(count + 64, fill, dtype=np.uint8)
    return memory[-memory.ctypes.data % 64 :][:count]


def placed(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The plan's pieces and the memory that they read."""
    memory = aligned(len(plan.memory), 0)
    memory[:] = plan.memory
    return plan.at(memory.ctypes.data), memory


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def emulate(
    emulator: ctypes.CDLL, plan: Plan, pieces: np.ndarray, blocks: int, checksum: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bucket, sums and flags of the emulated kernel."""
    bucket = aligned(plan.bucket_bytes, 7)
    sums, flags = np.zeros(plan.tensors, dtype=np.uint64), np.zeros(plan.tensors, dtype=np.uint32)
    where = (address(bucket), address(sums), address(flags))
    emulator.emulate(address(pieces), ctypes.c_int64(len(pieces)), int(checksum), blocks, *where, blocks)
    return bucket, sums, flags


def on_cpu(plan: Plan, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bucket = torch.full((plan.bucket_bytes,), 7, dtype=torch.uint8)
    sums, flags = np.zeros(plan.tensors, dtype=np.uint64), np.zeros(plan.tensors, dtype=np.uint32)
    kernel.pack(pieces, bucket, sums, flags=flags, isa="scalar")
    return bucket.numpy(), sums, flags


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{OP(form[0]).name}-{RULE(form[1]).name}-{form[2]}-{form[3]}")
def test_emulated_kernel_equals_the_cpu_kernel_in_every_form(
    emulator: ctypes.CDLL, form: tuple[int, int, int, int]
) -> None:
    assert_equal_to_the_cpu(emulator, random_plan(FORMS.index(form), forms=[form], tensors=12), blocks=3)


@pytest.mark.parametrize("seed", range(12))
def test_emulated_kernel_equals_the_cpu_kernel_on_mixed_plans(emulator: ctypes.CDLL, seed: int) -> None:
    assert_equal_to_the_cpu(emulator, random_plan(seed), blocks=1 + seed % 5)


def assert_equal_to_the_cpu(emulator: ctypes.CDLL, plan: Plan, blocks: int) -> None:
    pieces, memory = placed(plan)
    got, right = emulate(emulator, plan, pieces, blocks), on_cpu(plan, pieces)
    for what, mine, theirs in zip(("bucket", "sums", "flags"), got, right, strict=True):
        assert np.array_equal(mine, theirs), (what, np.flatnonzero(mine != theirs)[:5], pieces)
    assert memory.size  # alive until here


@pytest.mark.parametrize("seed", range(4))
def test_emulated_checksum_equals_the_cpu_kernel(emulator: ctypes.CDLL, seed: int) -> None:
    plan = random_plan(seed, forms=[(OP.COPY, 0, size, size) for size in (1, 2, 3, 4, 8)])
    pieces, memory = placed(plan)
    right = np.zeros(plan.tensors, dtype=np.uint64)
    kernel.checksum_rects(pieces, right)
    bucket, sums, _ = emulate(emulator, plan, pieces, 3, checksum=True)
    assert np.array_equal(sums, right) and (bucket == 7).all()
    assert memory.size


def test_the_plans_reach_every_path(emulator: ctypes.CDLL) -> None:
    reached = {
        emulator.path_of(address(pieces[k : k + 1]), 0)
        for seed in range(12)
        for pieces in [random_plan(seed).at(64)]
        for k in range(len(pieces))
        if pieces[k]["rows"] and pieces[k]["cols"]
    }
    assert reached == set(range(PATHS))


def test_thousands_of_pieces_find_their_tiles(emulator: ctypes.CDLL) -> None:
    plan = random_plan(0, forms=[(OP.COPY, 0, 2, 2)], tensors=1000, side=6)
    assert len(plan.pieces) > 1500
    assert_equal_to_the_cpu(emulator, plan, blocks=2)
