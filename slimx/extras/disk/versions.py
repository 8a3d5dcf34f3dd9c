"""Published versions as files: buckets in safetensors format and a manifest with every tensor's checksum.

    DIRECTORY/version-000007.epoch-2.partial/bucket-00000.safetensors ...     while it is being written
    DIRECTORY/version-000007/{bucket-*.safetensors, manifest.json}    complete: renamed as a whole

Versions on disk serve engines that share only a file system with the trainers, and engines that recover while the
trainers are busy or gone, because a complete version can be read without the trainers. Receivers map a file as they map
the publisher's memory, and compare the same checksums.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slimx.durable import sync_directory, write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json
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
"""Names of data types in safetensors files, by their torch names."""


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a bucket on disk. It contains the whole bucket, or changes to it (`slimx.extras.disk.changes`)."""

    attempt: str
    """Unique name of the publication attempt that wrote the file."""
    path: str
    start: int
    """Offset in bytes of the bucket or its changes within the file."""
    nbytes: int
    """Size in bytes of the bucket, or of its changes, in the file."""


class VersionDirectory:
    """Published versions in one directory, with one writer and with readers on any machine that mounts it."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._manifest: Manifest | None = None
        self._buckets: dict[int, PackedBucket] = {}

    def begin(self, manifest: Manifest) -> None:
        """Starts writing the version that `manifest` describes. Removes unfinished versions of an earlier writer."""
        for unfinished in self.directory.glob("version-*.partial"):
            shutil.rmtree(unfinished)
        self._manifest = manifest
        self._buckets = {}
        self._partial.mkdir(parents=True)

    def add(self, bucket: int, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
        """Writes the bucket with index `bucket`, whose bytes are `data`, uint8 [size]. Returns the bucket with the path
        that its file will have once the version is complete."""
        path = self._partial / f"bucket-{bucket:05d}.safetensors"
        written = write_bucket(path, packed, data)
        self._buckets[bucket] = written
        return written

    def commit(self) -> None:
        """Completes the version, so that readers see it, and removes older versions."""
        buckets = [_to_json(self._buckets[index]) for index in sorted(self._buckets)]
        content = {"manifest": self.manifest.to_json(), "buckets": buckets}
        write_file(self._partial / MANIFEST, json.dumps(content).encode())
        complete = self._path(self.manifest.version)
        if complete.exists():  # the same version is published again
            shutil.rmtree(complete)
        self._partial.rename(complete)
        sync_directory(self.directory)
        self._remove_old(complete)

    def _remove_old(self, complete: Path) -> None:
        for other in self.directory.glob("version-??????"):
            if other != complete:
                shutil.rmtree(other)

    def _path(self, version: int) -> Path:
        return self.directory / f"version-{version:06d}"

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise SlimxError(
                f"{self.directory}: no version is being written; call begin first",
            )
        return self._manifest

    @property
    def _partial(self) -> Path:
        # Named after the attempt, so that late writes of an abandoned attempt cannot affect it.
        attempt = f"{self.manifest.version:06d}.epoch-{self.manifest.membership_epoch}"
        return self.directory / f"version-{attempt}.partial"


class StoredVersion:
    """Complete version on disk, as a source of weights (`slimx.reshard.parties.Source`)."""

    def __init__(self, path: Path, manifest: Manifest, buckets: list[PackedBucket]):
        self.path = path
        self.manifest = manifest
        self.buckets = buckets

    def __str__(self) -> str:
        return str(self.path)

    async def begin(self, manifest: Manifest) -> None:
        """Raises SlimxError if `manifest` describes a version other than the stored one."""
        if manifest.version != self.manifest.version:
            raise SlimxError(
                f"{self.path} contains {self.manifest}, but {manifest} is being published; publish the stored weights "
                f"as version {self.manifest.version}",
                code="disk.version",
                about=str(self.path),
            )

    async def forms(self) -> list[dict[str, str]]:
        forms: list[dict[str, str]] = [{} for _ in self.buckets[0].targets]
        for bucket in self.buckets:
            for tensors, target_forms in zip(bucket.targets, forms, strict=True):
                target_forms.update({tensor.name: _form(tensor) for tensor in tensors})
        return forms

    async def bucket_count(self) -> int:
        return len(self.buckets)

    async def gather(self, bucket: int) -> PackedBucket:
        return self.buckets[bucket]

    async def release(self, bucket: int | None = None) -> None:
        """Does nothing, because no memory is allocated for buckets."""


def newest(directory: Path | str) -> StoredVersion | None:
    """Returns the newest complete version in `directory`; None if there is none. Raises SlimxError if that version
    cannot be read."""
    versions = sorted(Path(directory).glob("version-??????"))
    if not versions:
        return None
    version = versions[-1]
    path = version / MANIFEST
    try:
        content = json.loads(path.read_text())
        buckets = [_from_json(entry, version) for entry in content["buckets"]]
        return StoredVersion(version, Manifest.from_json(content["manifest"]), buckets)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SlimxError(
            f"{path} cannot be read ({type(error).__name__}: {error}); make the file readable for this user, or "
            f"remove the directory {version} if the file is damaged",
            code="disk.manifest",
            about=str(path),
        ) from None


def write_bucket(path: Path, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
    """Writes `data`, the bytes of the bucket `packed`, uint8 [size], atomically to a safetensors file at `path`.
    Returns the bucket as it is stored in the file."""
    header: Json = {"__metadata__": {"format": "pt"}}
    has_ranks = len(packed.targets) > 1
    end = 0
    for rank, tensors in enumerate(packed.targets):
        for tensor in tensors:
            if tensor.offset > end:  # in a safetensors file every byte must belong to a tensor
                header[f"padding at {end}"] = _entry("uint8", (tensor.offset - end,), end, tensor.offset)
            end = tensor.offset + tensor.nbytes
            name = f"rank {rank}: {tensor.name}" if has_ranks else tensor.name
            header[name] = _entry(tensor.dtype, tensor.shape, tensor.offset, end)
    if packed.size > end:
        header[f"padding at {end}"] = _entry("uint8", (packed.size - end,), end, packed.size)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # aligns tensors to cache lines
    start = 8 + len(text)
    write_file(path, len(text).to_bytes(8, "little"), text, memoryview(data.numpy()))
    targets = []
    for tensors in packed.targets:
        targets.append(tuple(replace(t, offset=t.offset + start) for t in tensors))
    return PackedBucket(str(path), start + packed.size, tuple(targets))


def _entry(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> Json:
    return {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}


def write_file(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes `pieces` to a file atomically and durably: readers see either no file or a complete one, even after a
    crash of the machine."""
    write_atomic(path, *pieces)
    sync_directory(path.parent)


def _form(tensor: PackedTensor) -> str:
    return f"{tensor.dtype}:{','.join(map(str, tensor.shape))}"


def _to_json(bucket: PackedBucket) -> Json:
    targets = [[tensor.to_json() for tensor in tensors] for tensors in bucket.targets]
    entry: Json = {"file": Path(bucket.path).name, "size": bucket.size, "targets": targets}
    if bucket.chain:
        entry["chain"] = [asdict(file) | {"path": "/".join(Path(file.path).parts[-2:])} for file in bucket.chain]
    return entry


def _tensor_from_json(tensor: Json) -> PackedTensor:
    return PackedTensor(**tensor | {"shape": tuple(tensor["shape"]), "checksum": int(tensor["checksum"], 16)})


def _from_json(entry: Json, directory: Path) -> PackedBucket:
    targets = []
    for tensors in entry["targets"]:
        targets.append(tuple(_tensor_from_json(tensor) for tensor in tensors))
    chain = []
    for file in entry.get("chain", ()):
        chain.append(ChainFile(**file | {"path": str(directory.parent / file["path"])}))
    return PackedBucket(str(directory / entry["file"]), entry["size"], tuple(targets), chain=tuple(chain))
