"""Compares conversions of a checkpoint with copies of the same bytes.

    python benchmarks/convert.py --rounds 5 --out DIR

A copy reads the same files as the conversion and writes the same number of bytes, into files of the same sizes, with
the same number of threads, and syncs them: the cost of a conversion without computation. Copy and conversion
alternate, and so does the first of each round. Rates count bytes read and written. The
source was just read or written, so it comes from the page cache in both. DIR (a temporary one unless given) decides
which disk is measured; it needs four times --gb.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from machine import cpu_seconds, surroundings

sys.path.insert(0, str(Path(__file__).parents[1]))
from slimx.extras.convert import run
from slimx.extras.convert.work import Conversion, convert
from tests.checkpoint_stand import QWEN3_MOE, write_checkpoint

GOAL = 0.7
"""Share of the copy's rate that a conversion is to reach."""
LAYER_GB = 0.35
MODEL = QWEN3_MOE | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
}
"""Qwen3-30B-A3B's layers with a quarter of the experts and a small vocabulary."""
_CHUNK = 16 * 2**20


def tensor_files(directory: Path) -> list[Path]:
    """Returns the tensor files of a checkpoint, Hugging Face's or Megatron's."""
    return sorted(p for p in directory.rglob("*") if p.suffix in (".safetensors", ".distcp"))


def copy(sources: list[Path], sizes: list[int], out: Path, threads: int) -> None:
    """Reads `sources` once, front to back, and writes the bytes into new files of `sizes`, repeating them if needed."""
    read, bounds = sum(path.stat().st_size for path in sources), np.cumsum([0, *sizes])
    ends = [int(bound * read / bounds[-1]) for bound in bounds]
    out.mkdir()

    def one(number: int) -> None:
        left = sizes[number]
        with (out / str(number)).open("wb", buffering=0) as target:
            for part in _between(sources, ends[number], ends[number + 1]):
                target.write(part[:left])
                left -= min(left, len(part))
            while left > 0:  # more is written than read: fp8 to bf16
                left -= target.write(part[:left])
            os.fsync(target.fileno())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(len(sizes))))


def _between(sources: list[Path], first: int, last: int) -> Iterator[memoryview]:
    """Yields the bytes from `first` to `last` of the concatenated sources, in parts; each part overwrites the previous
    one."""
    memory, at = memoryview(bytearray(_CHUNK)), 0
    for path in sources:
        size = path.stat().st_size
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                while start < stop:
                    count = file.readinto(memory[: min(_CHUNK, stop - start)])
                    start += count
                    yield memory[:count]
        at += size


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall seconds of `work`, and the CPU seconds of this process and of the kernel on its behalf."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - used


@contextmanager
def directory(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True)
        yield path
        shutil.rmtree(path)
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def measure(
    name: str, make: Callable[[], Conversion], source: Path, work: Path, rounds: int, threads: int
) -> tuple[str, float]:
    """Returns a line of the table and its median ratio. The last output stays in WORK/NAME."""
    out, pairs = work / name, []
    sources = tensor_files(source)
    sizes: list[int] = []
    for number in range(-1, rounds):  # one round to warm up, whose output says what a copy has to write
        took: dict[str, tuple[float, float]] = {}
        for kind in ("copy", "convert") if number % 2 == 0 else ("convert", "copy"):
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(work / "copy", ignore_errors=True)
            if kind == "convert":
                took[kind] = seconds(lambda: convert(make(), out, threads=threads, verify=False))
                sizes = [path.stat().st_size for path in tensor_files(out)]
            else:
                took[kind] = seconds(partial(copy, sources, sizes, work / "copy", threads))
        if number >= 0:
            pairs.append([[whole, cpu] for whole, cpu in (took["copy"], took["convert"])])
    shutil.rmtree(work / "copy", ignore_errors=True)
    if not out.exists():
        convert(make(), out, threads=threads, verify=False)
    gigabytes = (sum(path.stat().st_size for path in sources) + sum(sizes)) / 1e9
    measured = np.array(pairs)  # [rounds, copy and conversion, clock and CPU]
    copied, converted = gigabytes / np.median(measured[:, :, 0], axis=0)
    ratios, cpu = (measured[:, 0] / measured[:, 1]).T
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    line = (
        f"{name:<22}{gigabytes:>6.2f}{copied:>7.2f}{converted:>9.2f}{middle:>7.2f}   {low:.2f} to {high:.2f}   "
        f"{min(ratios):.2f} to {max(ratios):.2f}   {np.median(cpu):.2f}"
    )
    return line, float(middle)


def main(
    gb: Annotated[float, typer.Option(help="Size of the bf16 checkpoint.")] = 2.0,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Copies and conversions of each kind.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of conversion and copy.")] = 2,
    only: Annotated[str, typer.Option(help="One conversion of the table.")] = "",
    out: Annotated[Path | None, typer.Option(help="Directory to make, use and remove.")] = None,
) -> None:
    """Prints the table."""
    torch.set_num_threads(1)  # as the command does
    begin, others = time.perf_counter(), cpu_seconds()
    with directory(out) as work:
        layers = max(1, round(gb / LAYER_GB * MODEL["hidden_size"] / hidden))
        config = MODEL | {"num_hidden_layers": layers, "hidden_size": hidden}
        source = write_checkpoint(work / "source", config, file_bytes=10**9)
        print(
            f"{'conversion':<22}{'GB':>6}{'copy':>7}{'convert':>9}{'ratio':>7}   {'quartiles':<13}  {'range':<13}  CPU"
        )
        middles = []
        size = int(2.5e8)  # enough files for all threads
        megatron, fp8 = work / "hf-to-megatron", work / "hf-to-fp8"
        to_megatron = partial(run.hf_to_megatron, source, file_bytes=size)
        to_fp8 = partial(run.hf_to_fp8, source, file_bytes=size)
        for name, make, read in (
            ("hf-to-megatron", to_megatron, source),
            ("megatron-to-hf", partial(run.megatron_to_hf, megatron, source, file_bytes=size), None),
            ("hf-to-fp8", to_fp8, source),
            ("hf-to-int4", partial(run.hf_to_int4, source, file_bytes=size), source),
            ("hf-to-megatron, fp8", partial(run.hf_to_megatron, fp8, file_bytes=size), None),
        ):
            if only not in ("", name):
                continue
            if read is None:
                before, read = (to_megatron, megatron) if name == "megatron-to-hf" else (to_fp8, fp8)
                if not read.exists():
                    convert(before(), read, threads=threads, verify=False)
            line, middle = measure(name, make, read, work, rounds, threads)
            print(line, flush=True)
            middles.append(middle)
    used = (cpu_seconds() - others) / (time.perf_counter() - begin)
    print(f"copy, convert: GB/s read and written, medians of {rounds} rounds; ratio: of their rates, pair by pair")
    print("CPU: the copy's processor time over the conversion's, median")
    print(
        f"goal {GOAL}: {'met' if min(middles) >= GOAL else 'missed'}; {threads} threads; others used {used:.2f} cores"
    )
    print(surroundings("torch", "safetensors"))


if __name__ == "__main__":
    typer.run(main)
