"""`slimx doctor` says what is there and what is missing, on any machine, and never fails itself."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from slimx import cli
from slimx.errors import SlimxError
from slimx.extras.boxes.programs.sandbox import Sandbox
from slimx.extras.cpu.adapters import absent as sglang_absent
from slimx.extras.doctor import machine as doctor
from slimx.extras.doctor.command import described
from slimx.extras.exact.ordered import kernel as exact_kernel
from slimx.layout.ranks import Sizes
from slimx.reshard.kernels import cpu as kernel
from slimx.trainer.device import backends
from tests.refusals import numbers


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str, style: str | None) -> None:
        self.lines.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def line(screen: Screen, name: str) -> str:
    return next(text for text in screen.lines if text.split()[:1] == [name])


def problem(screen: Screen, kind: str, name: str) -> str:
    """Returns the line of a problem; `kind`: missing or note."""
    return next(text for text in screen.lines if text.split()[:2] == [kind, f"{name}:"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds without a GPU")
def test_this_environment_is_healthy_and_its_adapters_are_named(screen):
    assert doctor.examine(screen.print), screen.text
    assert "in force" in line(screen, "megatron_cpu") and "no GPU" in line(screen, "megatron_cpu")
    assert "plain torch" in line(screen, "megatron_layers")
    assert "sgl_kernel" in line(screen, "sglang_absent")
    assert doctor.PLUGIN_GROUP in line(screen, "sglang_plugin")
    assert all(isa in line(screen, "libslimx_cpu.so") for isa in kernel.isas() if isa != "best")
    assert all(isa in line(screen, "libslimx_exact.so") for isa in exact_kernel.isas())


@pytest.mark.needs("bwrap", "unshare", "prlimit")
def test_the_bound_of_a_programs_memory_is_named():
    (found,) = doctor.sandbox()
    assert found.problem is None and Sandbox().memory_bound in found.text


def test_a_machine_without_a_sandbox_may_run_what_needs_none(monkeypatch):
    monkeypatch.setattr(Sandbox, "check", lambda self: (_ for _ in ()).throw(SlimxError("does not hold")))
    (found,) = doctor.sandbox()
    assert found.problem and not found.needed


def test_stand_ins_are_those_of_the_adapter():
    assert set(doctor.STAND_INS) == set(sglang_absent.PACKAGES)


def test_distributions_of_flash_attention_are_those_that_trainers_look_for():
    assert doctor.FLASH == backends.FLASH


def test_missing_compilers_are_reported_and_flash_attn_4_is_a_note(tmp_path, monkeypatch):
    """Examines a bare machine after `make venv`: no toolkit, no Python.h, and a deep_ep that asserts one."""
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nassert os.environ.get('CUDA_HOME'), 'no CUDA home'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_cuda", lambda: True)
    monkeypatch.setattr(doctor, "_blackwell", lambda: False)
    monkeypatch.setattr(doctor, "cuda_home", lambda environment: None)
    monkeypatch.setattr(doctor, "python_header", lambda: None)
    monkeypatch.setattr(doctor, "_version", {"flash-attn-4": "4.0.0b36"}.get)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    bare = {finding.name: finding for finding in doctor.toolchain()}
    assert {name for name, finding in bare.items() if finding.problem} == {"nvcc", "Python.h", "deep_ep"}
    assert bare["nvcc"].needed and bare["Python.h"].needed and not bare["deep_ep"].needed
    assert "no CUDA home" in bare["deep_ep"].text
    assert bare["FlashAttention"].text == "flash-attn-4 4.0.0b36"
    monkeypatch.setattr(doctor, "cuda_home", lambda environment: tmp_path)
    monkeypatch.setattr(doctor, "link_error", lambda home, driver: "cannot find -lcudart")
    (compiler,) = (finding for finding in doctor.toolchain() if finding.name == "nvcc")
    assert compiler.needed and "cannot find -lcudart" in compiler.problem
    monkeypatch.setattr(doctor, "link_error", lambda home, driver: None)
    monkeypatch.setattr(doctor, "python_header", lambda: tmp_path / "Python.h")
    assert not [finding for finding in doctor.toolchain() if finding.problem]


def test_cubins_of_blackwell_are_missed_there_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_version", {}.get)
    assert not list(doctor._cubins({}, True)), "without flashinfer there is nothing to miss"
    versions = {"flashinfer-python": "0.7.2", "flashinfer-cubin": "0.6.13"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    named = {"FLASHINFER_CUBIN_DIR": str(tmp_path)}
    (hopper,), (blackwell,) = doctor._cubins(named, False), doctor._cubins(named, True)
    assert hopper.problem is None and blackwell.problem is not None and not blackwell.needed
    versions["flashinfer-cubin"] = "0.7.2"
    (packaged,) = doctor._cubins(named, True)
    versions.pop("flashinfer-cubin")
    base = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    cubin = tmp_path / ".cache" / "flashinfer" / "cubins" / "0a1b" / "fmha.cubin"
    cubin.parent.mkdir(parents=True)
    cubin.touch()
    (downloaded,) = doctor._cubins(base, True)
    assert packaged.problem is None and downloaded.problem is None and str(cubin.parents[1]) in downloaded.text


def test_a_version_out_of_range_is_missing_and_one_off_the_lock_is_a_note(screen, monkeypatch):
    true = importlib.metadata.version
    versions = {"megatron-core": "0.17.0", "ray": "2.59.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or true(name))
    monkeypatch.setattr(doctor, "lock_of", lambda: ("cpu.txt", {"ray": "2.60.0"}))
    assert not doctor.examine(screen.print)
    assert "0.17.0" in problem(screen, "missing", "megatron-core")
    assert all(words in problem(screen, "note", "ray") for words in ("2.59.0", "2.60.0", "cpu.txt"))


@pytest.mark.parametrize(
    "absent",
    [
        *(pytest.param(name, marks=pytest.mark.slow("packages one by one")) for name in ("numpy", "pynvml")),
        pytest.param("packaging", marks=pytest.mark.slow("packages one by one")),
        "torch",
        "torch,numpy,pynvml,packaging,rich,typer,pydantic,omegaconf,yaml",
    ],
)
def test_no_package_is_needed_to_say_that_it_is_absent(absent):
    program = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({absent.split(',')!r}))\n"
        "runpy.run_module('slimx.extras.doctor.machine', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Adapters" in done.stdout
    assert done.returncode == (0 if absent == "packaging" else 1)


def test_a_look_that_fails_is_a_problem_and_not_the_end(screen, monkeypatch):
    def machine():
        raise OSError("no /proc here")
        yield

    monkeypatch.setattr(doctor, "machine", machine)
    assert not doctor.examine(screen.print)
    assert "OSError: no /proc here" in problem(screen, "missing", "machine")
    assert "Kernels" in screen.text


def test_gpus_are_listed_with_memory_driver_and_uuid(screen, monkeypatch):
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30, free=79 * 2**30),
        nvmlDeviceGetName=lambda handle: "NVIDIA H100",
        nvmlDeviceGetUUID=lambda handle: "GPU-1234",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert doctor.examine(screen.print)
    assert {"580.65,", "1"} <= {*line(screen, "driver").split()}
    (gpu,) = (text for text in screen.lines if "GPU-1234" in text)
    assert "NVIDIA H100" in gpu and {80.0, 79.0} <= {*numbers(gpu)}
    assert "torch" in problem(screen, "note", "GPUs")


@pytest.mark.parametrize(("healthy", "status"), [(True, 0), (False, 1)])
def test_the_command_exits_with_the_verdict(healthy, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda console: healthy)
    monkeypatch.setattr(sys, "argv", ["slimx", "doctor"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == status


def test_a_layout_is_described_by_the_sizes_that_split():
    assert described(Sizes()) == "trainer.world_size=1 (one rank)"
    assert described(Sizes(data=2, expert=2, split=(1, 2))) == "trainer.world_size=2 (data 2, expert 2)"
