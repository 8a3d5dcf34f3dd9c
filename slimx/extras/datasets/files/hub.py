"""Files of a data set of the Hugging Face Hub, downloaded or from the caches of earlier downloads.

huggingface_hub is imported only when it is used, and `datasets` only if it is installed and no other cache has the
files.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

from slimx.errors import SlimxError, raised
from slimx.extras.datasets.files.directories import chosen_files

HUB = "hf://"
CONVERTED = "refs/convert/parquet"
"""Branch on which the Hub provides the parquet files of each data set, as SUBSET/SPLIT/NNNN.parquet."""


def hub_files(path: str, subset: str | None, split: str | None) -> list[Path]:
    """Returns the files of one subset and split of hf://OWNER/NAME or hf://OWNER/NAME/SUBSET/SPLIT, in order. The
    default split is train.

    Without a network the files come from a cache: that of huggingface_hub, with the Hub's parquet files or the owner's
    original files, or that of the `datasets` package. Raises SlimxError if no cache has them."""
    name, subset, split = _hub_name(path, subset, split)
    try:
        return chosen_files(_downloaded(name, subset, split), subset, split)
    except SlimxError as error:
        if error.code != "prompts.download":
            raise
        for cached in (_owners_files, _datasets_files):
            files = cached(name, subset, split)
            if files:
                return files
        raise


def _owners_files(name: str, subset: str | None, split: str) -> list[Path]:
    """Returns the files that the owner of the data set uploaded, from huggingface_hub's cache; [] if it has none in a
    supported format."""
    from huggingface_hub import snapshot_download

    folder = None if subset == "default" else subset  # "default" is the Hub's name for the only subset of a data set
    try:
        return chosen_files(Path(snapshot_download(name, repo_type="dataset", local_files_only=True)), folder, split)
    except Exception:  # any exception; the caller reports the failed download instead
        return []


def _datasets_files(name: str, subset: str | None, split: str) -> list[Path]:
    """Returns the Arrow files of a subset and split in the cache of the `datasets` package; [] if the package is not
    installed or its cache has none."""
    if importlib.util.find_spec("datasets") is None:
        return []
    from datasets import load_dataset

    try:
        return [Path(file["filename"]) for file in load_dataset(name, subset, split=split).cache_files]
    except Exception:  # as above
        return []


def _hub_name(path: str, subset: str | None, split: str | None) -> tuple[str, str | None, str]:
    """Splits hf://OWNER/NAME or hf://OWNER/NAME/SUBSET/SPLIT into OWNER/NAME, subset and split. The default split is
    train."""
    parts = path.removeprefix(HUB).split("/")
    if not all(re.fullmatch(r"[\w.-]+", part) for part in parts) or len(parts) not in (2, 4):
        raise SlimxError(f"{path} is not a data set; write {HUB}OWNER/NAME or {HUB}OWNER/NAME/SUBSET/SPLIT")
    if len(parts) == 4:
        subset, split = parts[2:]
    return "/".join(parts[:2]), subset, split or "train"


def _downloaded(name: str, subset: str | None, split: str) -> Path:
    """Downloads the parquet files of a data set from the Hub unless they are in the cache, and returns their
    directory."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SlimxError(
            f"{HUB}{name}: downloads need huggingface_hub, which cannot be imported ({error}); run pip install "
            "huggingface_hub",
        ) from error
    patterns = f"{subset or '*'}/{split}/*.parquet"
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=CONVERTED, allow_patterns=patterns))
    except Exception as error:  # any exception: no network, an unknown data set, one that needs a token
        reason = textwrap.shorten(raised(error), 400, placeholder=" ...")
        raise SlimxError(
            f"{HUB}{name} cannot be downloaded ({reason}); correct the name, or download the data set on another "
            "machine, copy the directory to this machine, and give the path of the directory",
            code="prompts.download",
            about=f"{HUB}{name}",
        ) from error
