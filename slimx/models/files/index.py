"""Reads the JSON files of a Hugging Face directory: objects such as config.json, and the index that maps tensors to
safetensors files. Errors name the file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slimx.errors import SlimxError
from slimx.json_types import Json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HUB_ID = re.compile(r"(?!(checkpoints|data|models?|runs|weights)/)[\w-][\w.-]*/[\w-][\w.-]*")
"""Pattern of model names on the Hugging Face Hub, such as Qwen/Qwen3-0.6B, but not of usual names of local folders."""
_RESTORE = "restore the file from the checkpoint's source"


def check_downloaded(directory: Path) -> None:
    """Raises SlimxError with the download command if `directory` does not exist and looks like a model name on the
    Hugging Face Hub. A path whose parent directory exists and contains no models is not treated as a model name."""
    folder = directory.parent
    local = folder.is_dir() and not any(folder.glob("*/config.json"))
    if not directory.exists() and HUB_ID.fullmatch(str(directory)) and not local:
        raise SlimxError(
            f"{directory}: no such directory; if it is the name of a model on the Hugging Face Hub, download the "
            f"model with `hf download {directory} --local-dir {directory}` and repeat this command",
        )


def read_object(file: Path) -> Json:
    """Returns the JSON object in `file`. Raises SlimxError, which names the file, if the file cannot be read or
    contains anything but a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # errors of JSON and of UTF-8 are ValueErrors
        raise SlimxError(
            f"{file}: the file is not valid JSON ({error}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    except OSError as error:
        raise SlimxError(
            f"{file}: the file cannot be read ({error.strerror}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    if not isinstance(content, dict):
        raise SlimxError(f"{file}: the file is not a JSON object; {_RESTORE}", code="checkpoint.json", about=str(file))
    return content


def indexed_files(directory: Path) -> dict[str, str] | None:
    """Returns the file name of each tensor, by tensor name, according to the index in `directory`; None if it has no
    index.

    Raises SlimxError if the model must be downloaded first, if the index is invalid, or if the index names a file that
    is missing or in another directory."""
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
            f"{index}: the file has no weight_map from tensor names to file names; {_RESTORE}",
            code="checkpoint.index",
            about=str(index),
        )
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise SlimxError(
                f"{index}: the file contains the path {file!r} instead of a file name; {_RESTORE}",
                code="checkpoint.index",
                about=file,
            )
        if not (directory / file).is_file():
            raise SlimxError(
                f"{directory}: shard {file}, which {INDEX} names, is missing; download the shard again",
                code="checkpoint.shard",
                about=file,
            )
    return weight_map
