"""Writes the table of scales that the GPU computes by the rule `triton`: `python tools/gpu/scales.py DIR`."""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # slimx need not be installed

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    if reason := kernel_cuda.missing():
        parser.error(reason)
    table = kernel_cuda.triton_scales(0)
    amax = (np.arange(len(table), dtype=np.uint32) << 16).view(np.float32)
    nearest = np.maximum(amax, np.float32(1e-10)) / np.float32(448)
    differ = float((table[:, 0] != nearest).mean())
    path = folder / kernel.TRITON_SCALES.name
    np.save(path, table)
    stored = kernel.TRITON_SCALES
    state = "none is stored" if not stored.exists() else f"equal to it: {np.array_equal(np.load(stored), table)}"
    print(f"{path}: {differ:.1%} of the scales are not the nearest float; to be stored as {stored} ({state})")


if __name__ == "__main__":
    main()
