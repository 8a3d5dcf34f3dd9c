"""Requirements of slimx and the commands that install them, with Python's standard library alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import slimx

ROOT = Path(slimx.__file__).parents[1]
LOCKS = Path(slimx.__file__).with_name("extras") / "install/locks"
INSTALL, INSTALL_CUDA = "slimx setup", "slimx setup --lock cu130"
"""Commands that install the locks for CPUs and for CUDA 13.0."""
BUILD = "pip install --force-reinstall --no-deps slimx"
"""Command that installs slimx itself, with its libraries."""
REPAIR = INSTALL
"""Command for a library of slimx that cannot be loaded."""
if (ROOT / "Makefile").is_file():  # in a clone, `make` also creates the environment
    INSTALL, INSTALL_CUDA = "make venv", "make venv LOCK=cu130"
    BUILD, REPAIR = "make build", "make venv build"


def split_requirement(requirement: str) -> tuple[str, str]:
    """Splits a requirement into the package's name and its version range: `ray[default]>=2.50` becomes ("ray",
    ">=2.50")."""
    match = re.fullmatch(r"([\w.-]+)(\[[^]]*\])?\s*([^;]*?)\s*(?:;.*)?", requirement)
    assert match is not None
    return match[1], match[3]


def fits(version: str, needed: str) -> bool:
    """Returns True if `version` is within the version range `needed`."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True  # `packaging` is in the lock file, so its absence is reported
    return SpecifierSet(needed).contains(version, prereleases=True)


def is_needed(requirement: str) -> bool:
    """Returns True if a run needs the requirement: one of slimx itself or of its extra `train`."""
    extra = re.search(r"extra == ['\"]([\w.-]+)", requirement)
    return extra is None or extra[1] == "train"


def lock_of() -> tuple[str, dict[str, str]]:
    """Returns the name and the package versions of the lock file from which this environment was installed; an
    empty name and no versions if it was installed in another way."""
    for file in sorted(LOCKS.glob("*.txt")):
        if Path(sys.prefix, f".installed-{file.stem}").exists():
            return file.name, dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE))
    return "", {}
