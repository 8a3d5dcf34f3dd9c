"""Files of a data set of the Hugging Face Hub: downloaded, or from the caches where an earlier download left them.

huggingface_hub is imported where it is needed; `datasets` only where it is installed and nothing else has the files.
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
"""Branch on which the Hub keeps any data set's parquet files, as SUBSET/SPLIT/NNNN.parquet."""


def hub_files(path: str, subset: str | None, split: str | None) -> list[Path]:
    """Files of one subset and split of hf://OWNER/NAME or hf://OWNER/NAME/SUBSET/SPLIT, in order; split train where
    none is named.

    Without a network they come from a cache: that of huggingface_hub, with the Hub's parquet files or with the data set
    as its owner stored it, or that of the `datasets` package. Raises SlimxError where none has them."""
    name, subset, split = _hub_name(path, subset, split)
    try:
        return chosen_files(_downloaded(name, subset, split), subset, split)
    except SlimxError as error:
        if error.code != "prompts.download":
            raise
        for cached in (_owners_files, _datasets_files):
            if files := cached(name, subset, split):
                return files
        raise


def _owners_files(name: str, subset: str | None, split: str) -> list[Path]:
    """Files of the owner's own branch in huggingface_hub's cache; [] where they are not there or of no form that slimx
    reads."""
    from huggingface_hub import snapshot_download

    folder = None if subset == "default" else subset  # the Hub's name for the subset of a data set that has none
    try:
        return chosen_files(Path(snapshot_download(name, repo_type="dataset", local_files_only=True)), folder, split)
    except Exception:  # of many kinds; the failure of the download itself is what is told
        return []


def _datasets_files(name: str, subset: str | None, split: str) -> list[Path]:
    """Arrow files that the `datasets` package keeps of an earlier load; [] where it is not installed or has none."""
    if importlib.util.find_spec("datasets") is None:
        return []
    from datasets import load_dataset

    try:
        return [Path(file["filename"]) for file in load_dataset(name, subset, split=split).cache_files]
    except Exception:  # as above
        return []


def _hub_name(path: str, subset: str | None, split: str | None) -> tuple[str, str | None, str]:
    """Owner and name, subset and split that hf://OWNER/NAME or hf://OWNER/NAME/SUBSET/SPLIT means; train where no split
    is given."""
    parts = path.removeprefix(HUB).split("/")
    if not all(re.fullmatch(r"[\w.-]+", part) for part in parts) or len(parts) not in (2, 4):
        raise SlimxError(f"{path}: not of the form {HUB}OWNER/NAME or {HUB}OWNER/NAME/SUBSET/SPLIT")
    if len(parts) == 4:
        subset, split = parts[2:]
    return "/".join(parts[:2]), subset, split or "train"


def _downloaded(name: str, subset: str | None, split: str) -> Path:
    """The directory of a data set of the Hub that has its parquet files, from the cache where they are there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SlimxError(
            f"{HUB}{name}: downloads go through huggingface_hub, which is not installed; pip install huggingface_hub",
        ) from error
    patterns = f"{subset or '*'}/{split}/*.parquet"
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=CONVERTED, allow_patterns=patterns))
    except Exception as error:  # of many kinds: no network, no such data set, one that asks for a token
        told = textwrap.shorten(raised(error), 400, placeholder=" ...")
        raise SlimxError(
            f"{HUB}{name}: cannot be downloaded ({told}); download it where there is a network and give its directory",
            code="prompts.download",
            about=f"{HUB}{name}",
        ) from error
