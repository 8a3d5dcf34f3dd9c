"""Writes into requirements/ the hashes of what a package index has of every pin: `make locks`.

    python -m tools.locks PYLOCK

PYLOCK is uv's pylock.toml of requirements/cu130.txt and docs.txt, which have all pins of the locks. A pin gets the
wheels for the locks' Python on x86_64 and aarch64 Linux; one without such wheels gets its source archive.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PYTHON = (3, 12)
PLATFORMS = [
    f"{kind}_{machine}"
    for machine in ("x86_64", "aarch64")
    for kind in ("linux", "manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, 40)))
]
"""Up to glibc 2.39, that of the Dockerfile's image."""


def hashes(package: dict[str, Any], tags: frozenset[Tag]) -> list[str]:
    """Returns the SHA-256 sums of the files of a package that pip may install under `tags`, sorted."""
    files = [
        wheel
        for wheel in package.get("wheels", [])
        if parse_wheel_filename(wheel["url"].rsplit("/", 1)[1].replace("%2B", "+"))[3] & tags
    ]
    return sorted(file["hashes"]["sha256"] for file in files or [package["sdist"]])


def hashed(lock: str, sums: dict[str, list[str]]) -> str:
    """Returns the text of a lock with the hashes of each `name==version` in place of those that it has."""
    lines = []
    for line in lock.splitlines():
        if not line.startswith("#"):
            pin = line.split()[0]
            line = " ".join([pin, *(f"--hash=sha256:{digest}" for digest in sums[pin])])
        lines.append(line)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pylock", type=Path)
    packages = tomllib.loads(parser.parse_args().pylock.read_text())["packages"]
    tags = frozenset([*cpython_tags(PYTHON, platforms=PLATFORMS), *compatible_tags(PYTHON, "cp312", PLATFORMS)])
    sums = {f"{package['name']}=={package['version']}": hashes(package, tags) for package in packages}
    for lock in sorted(REQUIREMENTS.glob("*.txt")):
        lock.write_text(hashed(lock.read_text(), sums))


if __name__ == "__main__":
    sys.exit(main())
