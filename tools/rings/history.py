"""Reads from git the commit that runs, and how old another is; neither fails without git."""

from __future__ import annotations

import subprocess
from pathlib import Path

UNKNOWN = "unknown"


def commit(root: Path) -> str:
    """Returns the short id of HEAD, with + if the tree differs from it; "unknown" without git."""
    head = _git(root, "rev-parse", "--short=10", "HEAD")
    return UNKNOWN if head is None else head + ("+" if _git(root, "status", "--porcelain") else "")


def age(root: Path, commit: str) -> int | None:
    """Returns the number of commits since `commit`; None if git cannot say."""
    count = None if commit == UNKNOWN else _git(root, "rev-list", "--count", f"{commit.rstrip('+')}..HEAD")
    return None if count is None else int(count)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
