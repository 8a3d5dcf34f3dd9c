"""The JSON files of a Hugging Face directory: objects read with a refusal that names the file, and which file holds
which tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Form of the names of models on the Hugging Face Hub."""
_RESTORE = "restore the file from the checkpoint's source"


def check_downloaded(directory: Path) -> None:
    """Raise SlimxError with the command that downloads it for a directory that is not there and has the form of a name
    of the Hugging Face Hub, unless it lies in a folder that is there and holds no model."""
    folder = directory.parent
    local = folder.is_dir() and not any(folder.glob("*/config.json"))
    if not directory.exists() and HUB_ID.fullmatch(str(directory)) and not local:
        raise SlimxError(
            f"{directory}: no such directory; if it is a model of the Hugging Face Hub, `hf download {directory} "
            f"--local-dir {directory}` brings it here, and the same command goes on",
        )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises SlimxError, naming it, for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # json's and UTF-8's errors are ValueErrors
        raise SlimxError(
            f"{file}: not valid JSON ({error}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    except OSError as error:
        raise SlimxError(
            f"{file}: cannot be read ({error.strerror}); {_RESTORE}", code="checkpoint.json", about=str(file)
        ) from error
    if not isinstance(found, dict):
        raise SlimxError(f"{file}: not a JSON object; {_RESTORE}", code="checkpoint.json", about=str(file))
    return found


def indexed_files(directory: Path) -> dict[str, str] | None:
    """File of each tensor by the index in `directory`; None without an index.

    Raises SlimxError for a directory that has to be downloaded, and for an index that is none, or that names a file
    which is missing or elsewhere."""
    check_downloaded(directory)
    index = directory / INDEX
    if not index.is_file():
        return None
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise SlimxError(
            f"{index}: no weight_map that says which file holds each tensor; {_RESTORE}",
            code="checkpoint.index",
            about=str(index),
        )
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            raise SlimxError(
                f"{index}: names {file!r}, which is no file beside it; {_RESTORE}", code="checkpoint.index", about=file
            )
        if not (directory / file).is_file():
            raise SlimxError(
                f"{directory}: shard {file} named in {INDEX} is missing; download it again",
                code="checkpoint.shard",
                about=file,
            )
    return where
