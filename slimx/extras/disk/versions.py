"""Published versions as files: buckets in safetensors form and a manifest with every tensor's checksum.

    DIRECTORY/version-000007.epoch-2.partial/bucket-00000.safetensors ...     while it is being written
    DIRECTORY/version-000007/{bucket-*.safetensors, manifest.json}    complete: renamed as a whole

For engines that share a file system with the trainers and nothing else, and for an engine that comes back while the
trainers are busy, or gone: a complete version needs nobody to be read. Receivers map a file as they map the publisher's
memory, and compare the same checksums.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slimx.durable import sync_directory, write_atomic
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket, PackedTensor

ALIGNMENT = 64
MANIFEST = "manifest.json"
DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a bucket on disk that is whole in one file and changed by those which follow
    (`slimx.extras.disk.changes`)."""

    attempt: str
    """The publication that wrote it: no other one has this name."""
    path: str
    start: int
    """Bytes before the bucket's own, or before its changes."""
    nbytes: int
    """Bytes of the bucket, or of its changes."""


class Shelf:
    """The versions in one directory. One writer; readers on any machine that sees it."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._manifest: Manifest | None = None
        self._buckets: dict[int, PackedBucket] = {}

    def begin(self, manifest: Manifest) -> None:
        """Start writing a version; what an earlier writer left unfinished is removed."""
        for left in self.directory.glob("version-*.partial"):
            shutil.rmtree(left)
        self._manifest, self._buckets = manifest, {}
        self._partial.mkdir(parents=True)

    def add(self, bucket: int, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
        """Write a bucket whose bytes are `data`, uint8 [size]; the same bucket as it lies in its file, complete."""
        path = self._partial / f"bucket-{bucket:05d}.safetensors"
        self._buckets[bucket] = out = write_bucket(path, packed, data)
        return out

    def commit(self) -> None:
        """Make the version complete; older ones are removed."""
        text = {"manifest": self.manifest.to_json(), "buckets": [_to_json(b) for _, b in sorted(self._buckets.items())]}
        write_file(self._partial / MANIFEST, json.dumps(text).encode())
        complete = self._place(self.manifest.version)
        if complete.exists():  # the same version, published again
            shutil.rmtree(complete)
        self._partial.rename(complete)
        sync_directory(self.directory)
        self._remove_old(complete)

    def _remove_old(self, complete: Path) -> None:
        for other in self.directory.glob("version-??????"):
            if other != complete:
                shutil.rmtree(other)

    def _place(self, version: int) -> Path:
        return self.directory / f"version-{version:06d}"

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise SlimxError(
                f"{self.directory}: nothing is being written; begin a version first",
            )
        return self._manifest

    @property
    def _partial(self) -> Path:
        # Named after the attempt: a write of an earlier one that nobody waits for any more cannot reach into it.
        attempt = f"{self.manifest.version:06d}.epoch-{self.manifest.membership_epoch}"
        return self.directory / f"version-{attempt}.partial"


class StoredVersion:
    """A complete version as a source of weights (`slimx.reshard.parties.Source`)."""

    def __init__(self, path: Path, manifest: Manifest, buckets: list[PackedBucket]):
        self.path, self.manifest, self.buckets = path, manifest, buckets

    def __str__(self) -> str:
        return str(self.path)

    async def begin(self, manifest: Manifest) -> None:
        """Refuse to be published as another version."""
        if manifest.version != self.manifest.version:
            raise SlimxError(
                f"{self.path} holds {self.manifest}, which cannot be published as {manifest}",
                code="disk.version",
                about=str(self.path),
            )

    async def forms(self) -> list[dict[str, str]]:
        ranks = range(len(self.buckets[0].targets))
        return [{t.name: _form(t) for bucket in self.buckets for t in bucket.targets[rank]} for rank in ranks]

    async def bucket_count(self) -> int:
        return len(self.buckets)

    async def gather(self, bucket: int) -> PackedBucket:
        return self.buckets[bucket]

    async def release(self, bucket: int | None = None) -> None:
        """Nothing is held."""


def newest(directory: Path | str) -> StoredVersion | None:
    """The newest complete version in `directory`."""
    found = sorted(Path(directory).glob("version-??????"))
    if not found:
        return None
    path = found[-1] / MANIFEST
    try:
        text = json.loads(path.read_text())
        buckets = [_from_json(entry, found[-1]) for entry in text["buckets"]]
        return StoredVersion(found[-1], Manifest.from_json(text["manifest"]), buckets)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SlimxError(
            f"{path} cannot be read ({type(error).__name__}: {error}); remove {found[-1]}",
            code="disk.manifest",
            about=str(path),
        ) from None


def write_bucket(path: Path, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
    """Write `data`, uint8 [size], as a safetensors file, in one piece or not at all; the bucket as it lies there."""
    header, several = {"__metadata__": {"format": "pt"}}, len(packed.targets) > 1
    end = 0
    for rank, tensors in enumerate(packed.targets):
        for tensor in tensors:
            if tensor.offset > end:  # safetensors allows no bytes that belong to no tensor
                header[f"padding at {end}"] = _entry("uint8", (tensor.offset - end,), end, tensor.offset)
            end = tensor.offset + tensor.nbytes
            name = f"rank {rank}: {tensor.name}" if several else tensor.name
            header[name] = _entry(tensor.dtype, tensor.shape, tensor.offset, end)
    if packed.size > end:
        header[f"padding at {end}"] = _entry("uint8", (packed.size - end,), end, packed.size)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # the tensors stay on cache lines
    start = 8 + len(text)
    write_file(path, len(text).to_bytes(8, "little"), text, memoryview(data.numpy()))
    targets = tuple(tuple(replace(t, offset=t.offset + start) for t in tensors) for tensors in packed.targets)
    return PackedBucket(str(path), start + packed.size, targets)


def _entry(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> dict[str, object]:
    return {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}


def write_file(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file that is complete, and on the disk, once it has its name."""
    write_atomic(path, *pieces)
    sync_directory(path.parent)


def _form(tensor: PackedTensor) -> str:
    return f"{tensor.dtype}:{','.join(map(str, tensor.shape))}"


def _to_json(bucket: PackedBucket) -> dict[str, object]:
    targets = [[tensor.to_json() for tensor in tensors] for tensors in bucket.targets]
    entry = {"file": Path(bucket.path).name, "size": bucket.size, "targets": targets}
    if bucket.chain:
        entry["chain"] = [asdict(file) | {"path": "/".join(Path(file.path).parts[-2:])} for file in bucket.chain]
    return entry


def _from_json(entry: dict, directory: Path) -> PackedBucket:
    targets = tuple(
        tuple(PackedTensor(**t | {"shape": tuple(t["shape"]), "checksum": int(t["checksum"], 16)}) for t in tensors)
        for tensors in entry["targets"]
    )
    chain = tuple(ChainFile(**file | {"path": str(directory.parent / file["path"])}) for file in entry.get("chain", ()))
    return PackedBucket(str(directory / entry["file"]), entry["size"], targets, chain=chain)
