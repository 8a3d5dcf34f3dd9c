"""Temperature and clocks of the GPUs of this machine, from NVIDIA's management library (NVML)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from slimx.errors import SlimxError, one_line
from slimx.extras.alerts.finding import Finding

MARGIN = 3
"""Distance in degrees Celsius from the temperature at which the GPU slows down within which it is too hot."""


class Gpu(Protocol):
    """The state of one GPU."""

    name: str
    """Its index, such as "GPU 3"."""

    def throttled(self) -> set[str]:
        """Returns the reasons, such as heat, for which the GPU lowers its clocks; a power limit is none."""
        ...

    def temperatures(self) -> tuple[int, int | None]:
        """Returns the temperature, and the one at which the GPU slows down, in degrees Celsius; None if the latter is
        unknown."""
        ...


class _NvmlGpu:
    """GPU of this machine. NVML is initialized."""

    def __init__(self, index: int) -> None:
        import pynvml

        from slimx.trainer.device.gpu import NvmlGpu

        self.name = f"GPU {index}"
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._gpu = NvmlGpu(pynvml.nvmlDeviceGetUUID(self._handle))

    def throttled(self) -> set[str]:
        return self._gpu.throttled()

    def temperatures(self) -> tuple[int, int | None]:
        now = int(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))
        kind = self._nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        try:
            return now, int(self._nvml.nvmlDeviceGetTemperatureThreshold(self._handle, kind))
        except self._nvml.NVMLError:  # some GPUs do not tell
            return now, None


def gpus_here() -> list[Gpu]:
    """Returns the GPUs of this machine; [] if there is none or NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [_NvmlGpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except (pynvml.NVMLError, SlimxError):
        return []


def look_at(gpus: list[Gpu]) -> Iterator[Finding]:
    """Yields a finding for each GPU."""
    for gpu in gpus:
        try:
            reasons = gpu.throttled()
            now, limit = gpu.temperatures()
        except Exception as error:  # NVML raises one of its errors if the GPU has fallen off the bus
            text = f"does not answer: {one_line(error)}"
            yield Finding(name="gpu", about=gpu.name, bad=True, good=False, text=text)
            continue
        hot = limit is not None and now > limit - MARGIN
        text = f"{now} degrees Celsius"
        usual = ""
        if limit is not None:
            text += f", slows down at {limit}"
            usual = f"at most {limit - MARGIN}"
        if reasons:
            text += f"; its clocks are lowered by {', '.join(sorted(reasons))}"
        bad = bool(reasons) or hot
        yield Finding(name="gpu", about=gpu.name, bad=bad, good=not bad, text=text, value=float(now), usual=usual)
