"""Collects the packages that trainer and engine need on a GPU machine without a network: `make gpu-wheels`.

    python -m tools.gpu.wheels [--python 3.12] [--out build/gpu-wheels]

That machine has numpy, torch, Triton, aiohttp, pytest and setuptools; tools/gpu/unpack.py puts the rest into a
directory there. The engine is SGLang for a model of text in bf16, with attention by Triton and sampling by torch:
sgl_kernel, flashinfer and torchvision are left out, and so are other kinds of models. Versions are those of
requirements/cpu.txt, and of cu130.txt where that lacks a package; Linux x86-64. The folder is emptied first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.gpu.unpack import MANIFEST

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-wheels"
LOCKS = (ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "cu130.txt")
TRAINER = (
    "megatron-core",
    "einops",  # megatron-core imports it
    "packaging",  # likewise
    "psutil",  # likewise, undeclared
    "pydantic",  # slimx.config; with the next three
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "omegaconf",  # slimx.config; with the next two
    "antlr4-python3-runtime",
    "PyYAML",
    "msgspec",  # slimx.data and checkpoints
    "xxhash",  # digests of checkpoint files
    "safetensors",  # weights
)
"""Packages that `slimx.trainer` imports, in an environment with numpy and torch."""
ENGINE = (
    "sglang",
    "apache-tvm-ffi",  # compiles SGLang's own kernels
    "torch-memory-saver",  # an engine that sleeps
    "fastapi",  # the server; with the next six
    "starlette",
    "uvicorn",
    "h11",
    "anyio",
    "sniffio",
    "annotated-doc",
    "orjson",
    "pybase64",
    "pyzmq",
    "python-multipart",
    "setproctitle",
    "partial-json-parser",  # calls of tools
    "xgrammar",  # grammars
    "openai",  # types of its protocol; with the next two
    "distro",
    "jiter",
    "jsonschema",  # with the next four
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "attrs",
    "compressed-tensors",  # quantization: SGLang imports every kind; with the next
    "loguru",
    "gguf",
    "prometheus-client",
    "opentelemetry-api",
    "nvidia-ml-py",
    "transformers",  # the version that SGLang pins
    "dill",
    "soundfile",  # the server imports it for speech; with the next
    "cffi",
    "ipython",  # sglang.utils imports it for notebooks; with the next
    "traitlets",
)
"""Packages that SGLang's server imports for a text model, in an environment that also has tokenizers and aiohttp."""
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PART_BYTES = 50 * 2**20
LEFT_OUT = (
    r"bin/.*",
    r".*\.pyi",
    r"(.*/)?__pycache__/.*",
    r"[^/]+/(tests?|testing)/.*(?<!\.py)",  # data of tests; SGLang imports some of its own at run time
    r"(?!xgrammar-)[^/]+\.dist-info/RECORD",  # tvm_ffi finds xgrammar's library by it
    r"[^/]+\.dist-info/(INSTALLER|REQUESTED|direct_url\.json)",
    r"sglang/multimodal_gen/.*",
    r"sglang/benchmark/.*\.so",
    r"sglang/srt/rust_extensions/.*\.so",  # another server, metrics and pictures: not used here
    r"sglang/srt/mem_cache/rust_tree_core/.*\.so",  # for another torch
    r"sglang/.*/configs/.*device_name=(?!NVIDIA_H[12]00)[^/]*\.json",
)
"""Files that nothing reads, as regular expressions that match whole paths."""


def pinned(names: Iterable[str], locks: Iterable[Path]) -> list[str]:
    """Returns the pin of every name with its hashes, from the first lock that has it. Exits with the names that no lock
    has."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    versions: dict[str, str] = {}
    for lock in locks:
        found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*])?==(.+)", lock.read_text(), re.MULTILINE)
        versions = {normal(name): version for name, version in found} | versions
    absent = [name for name in names if normal(name) not in versions]
    if absent:
        sys.exit(f"requirements/ has no {', '.join(absent)}: add it there, or take it out of tools/gpu/wheels.py")
    return [f"{name}=={versions[normal(name)]}" for name in names]


def install(requirements: list[str], python: str, target: Path) -> None:
    """Installs packages for another machine's Python into `target`. Exits if pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--no-compile"]
    command += [
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--python-version",
        python,
        "--implementation",
        "cp",
    ]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command += ["--require-hashes", "--requirement", file.name]
        if code := subprocess.run([*command, "--target", str(target)]).returncode:
            sys.exit(code)


def kept(site: Path) -> list[Path]:
    """Returns the files of `site` to pack, similar ones next to each other, which compresses best."""
    pattern = re.compile("|".join(LEFT_OUT))
    files = (path for path in site.rglob("*") if path.is_file())
    carried = [path for path in files if not pattern.fullmatch(path.relative_to(site).as_posix())]
    return sorted(carried, key=lambda path: (path.suffix, path.name, path))


def pack(site: Path, files: list[Path], archive: Path) -> None:
    """Writes `files` into `archive`, a tar file compressed by xz; the same files give the same bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": 2**27}]
    with lzma.open(archive, "wb", filters=filters) as compressed, tarfile.open(fileobj=compressed, mode="w|") as tar:
        for path in files:
            tar.add(path, path.relative_to(site).as_posix(), filter=plain)


def split(archive: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[dict[str, Any]]:
    """Cuts `archive` into files of at most `part_bytes`; returns the name, size and digest of each, in order."""
    parts: list[dict[str, Any]] = []
    with archive.open("rb") as file:
        while block := file.read(part_bytes):
            name = f"packages.tar.xz.{len(parts)}"
            (folder / name).write_bytes(block)
            parts.append({"name": name, "bytes": len(block), "sha256": hashlib.sha256(block).hexdigest()})
    return parts


def collect(requirements: list[str], python: str, folder: Path) -> list[dict[str, Any]]:
    """Collects packages in `folder`, without those of earlier calls; returns its parts. Exits if it contains other
    files."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        sys.exit(f"{folder} holds other files than packages, which would be removed: name another folder (--out)")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        site, archive = Path(scratch) / "site", Path(scratch) / "archive"
        install(requirements, python, site)
        pack(site, kept(site), archive)
        parts = split(archive, folder)
        with archive.open("rb") as file:
            whole = {"bytes": archive.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    packages = dict(line.split()[0].split("==") for line in requirements)
    manifest = {"python": python, "packages": packages, "archive": whole, "parts": parts}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's interpreter")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    requirements = pinned(dict.fromkeys((*TRAINER, *ENGINE)), LOCKS)
    parts = collect(requirements, options.python, options.out.resolve())
    size = sum(part["bytes"] for part in parts) / 2**20
    print(
        f"{options.out}: {len(requirements)} packages for Python {options.python}, {len(parts)} part(s), {size:.1f} MiB"
    )


if __name__ == "__main__":
    main()
