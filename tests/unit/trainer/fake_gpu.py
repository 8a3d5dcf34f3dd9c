"""A fake NVML, for faults that no real GPU has on demand."""

from __future__ import annotations

from dataclasses import dataclass, field

from slimx.trainer.device.gpu import MIB, Process


@dataclass
class FakeGpu:
    uuid: str = "GPU-1234"
    free: int = 10_000 * MIB
    total: int = 80_000 * MIB
    rows: tuple[bool, bool] = (False, False)
    errors: int = 0
    reasons: set[str] = field(default_factory=set)
    reported: list[int] = field(default_factory=list)
    near: set[int] = field(default_factory=lambda: {0, 1})

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    def processes(self) -> list[Process]:
        return [Process(7, 100 * MIB, "small"), Process(8, 60_000 * MIB, "sglang"), Process(9, None, "other")]

    def cpus(self) -> set[int]:
        return self.near

    def uncorrected_errors(self) -> int:
        return self.errors

    def remapped_rows(self) -> tuple[bool, bool]:
        return self.rows

    def throttled(self) -> set[str]:
        return self.reasons

    def xids(self) -> list[int]:
        found, self.reported = self.reported, []
        return found
