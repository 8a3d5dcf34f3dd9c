"""Reads the JSON files of a Hugging Face directory: objects, and the index that maps tensors to files. Errors name the
file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slimx.errors import SlimxError
from slimx.json_types import Json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Form of model names on the Hugging Face Hub."""
_RESTORE = "restore the file from the checkpoint's source"


def check_downloaded(directory: Path) -> None:
    """Raises SlimxError with the download command if `directory` does not exist and has the form of a Hugging Face Hub
    name, unless its parent exists and holds no models."""
    folder = directory.parent
    local = folder.is_dir() and not any(folder.glob("*/config.json"))
    if not directory.exists() and HUB_ID.fullmatch(str(directory)) and not local:
        raise SlimxError(
            f"{directory}: no such directory; if it is a model on the Hugging Face Hub, download it with `hf download "
            f"{directory} --local-dir {directory}` and repeat this command",
        )


def read_object(file: Path) -> Json:
    """Returns the JSON object in `file`. Raises SlimxError, naming it, for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # json's and UTF-8's errors are ValueErrors
        raise SlimxError(
            f"{file}: not valid JSON ({error}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    except OSError as error:
        raise SlimxError(
            f"{file}: cannot be read ({error.strerror}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    if not isinstance(content, dict):
        raise SlimxError(f"{file}: not a JSON object; {_RESTORE}", code="checkpoint.json", about=str(file))
    return content


def indexed_files(directory: Path) -> dict[str, str] | None:
    """Returns the file of each tensor according to the index in `directory`; None without an index.

    Raises SlimxError for a directory that has to be downloaded, an invalid index, or one that names a file that is
    missing or in another directory."""
    check_downloaded(directory)
    index = directory / INDEX
    if not index.is_file():
        return None
    weight_map = read_object(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise SlimxError(
            f"{index}: no weight_map from tensors to files; {_RESTORE}",
            code="checkpoint.index",
            about=str(index),
        )
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise SlimxError(
                f"{index}: names {file!r}, which is not a file in the same directory; {_RESTORE}",
                code="checkpoint.index",
                about=file,
            )
        if not (directory / file).is_file():
            raise SlimxError(
                f"{directory}: shard {file} named in {INDEX} is missing; download it again",
                code="checkpoint.shard",
                about=file,
            )
    return weight_map
