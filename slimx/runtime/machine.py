"""Identifies the machine of a process, as far as processes can see each other; does not import Ray, which a trainer
rank imports with its variables only."""

from pathlib import Path


def machine() -> str:
    """An identifier that is equal in two processes that can see each other by process id: one boot of one kernel, one
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
