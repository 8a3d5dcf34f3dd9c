"""Writes the table of docs/engines.md: the kernels that SGLang chooses for the engines of every shipped configuration.

    python -m tools.docs.make_backends                  writes the table
    python -m tools.docs.make_backends --rows FILE...   prints the rows of single configurations

No GPU is needed: SGLang resolves a server's arguments by rules that ask for properties of the machine, and SGLang's
`override_platform` answers with those of Hopper and of Blackwell. A unit test compares rows with the table, so run this
after a change of a configuration or of the pinned SGLang; it takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.engines.server.launch import prepare, prepare_imports
from slimx.engines.server.spec import engine_spec, server_args
from slimx.extras.convert.formats.fp8 import with_quantization
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.kernels import unpublishable
from slimx.models.families import read_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
SHIPPED = [
    file
    for file in sorted(ROOT.glob("configs/moe/*.yaml"))
    if not file.stem.startswith(("quickstart", "ling-flash-2.0"))
]
"""Configurations shown in the table."""
TITLE = "## What SGLang resolves"
HEAD = """

The table shows the kernels that SGLang 0.5.23 chooses for the policy groups in `configs/moe/` on an H100 (sm90) and a
GB300 (sm103). SGLang chose them from the properties of these GPUs; nothing ran on either. `auto` is resolved when a
layer is built: experts then use Triton's kernels, or DeepGEMM's with DeepEP, and fp8 linears use DeepGEMM if it is
installed. The last column shows whether slimx accepts the combination or which option it refuses. Ling is missing,
because its configuration is Python code in the checkpoint. `python -m tools.docs.make_backends` generates the table.

| engines of | GPU | attention | KV cache | experts | fp8 linears | all-to-all | sampler | all-reduce | accepted |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
GPUS: dict[str, dict[str, Any]] = {
    "sm90": {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "device_sm": 90, "device_capability": (9, 0)},
    "sm103": {
        "is_sm100": True,
        "is_sm100_or_sm110": True,
        "is_blackwell": True,
        "device_sm": 103,
        "device_capability": (10, 3),
    },
}
"""Fields of SGLang's PlatformContext that are true on a GPU; those in `NO` are false."""
NO = dict.fromkeys(
    ("is_sm90", "is_hopper_with_cuda_12_3", "is_sm100", "is_sm100_or_sm110", "is_sm110", "is_sm120", "is_blackwell"),
    False,
)


def resolved(arguments: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Returns a server's arguments after SGLang has resolved them for `gpu`. Call it in a separate process: the
    override of the platform cannot be undone."""
    import torch
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    override_platform(is_cuda=True, has_flashinfer=True, **NO | GPUS[gpu]).install()
    torch.cuda.get_device_capability = lambda *_: GPUS[gpu]["device_capability"]
    answer = ServerArgs(**{name: value for name, value in arguments.items() if value is not None})
    answer.resolve_once()
    return answer.resolved_dict()


def started_from(config: Config, group: Engines, directory: Path) -> Path:
    """Writes and returns a directory with the config.json from which the group's engines start; for fp8, as if the user
    had converted the checkpoint."""
    hf = json.loads((ROOT / config.model.path / "config.json").read_text())
    if config.publish.quantize and "quantization_config" not in hf:
        hf = with_quantization(hf, quantization(config.publish.quantize), [])
    path = directory / (group.model or config.model.path).replace("/", "-")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    return path


def cells(stem: str, config: Config, group: Engines, gpu: str, directory: Path) -> list[str]:
    """Returns the cells of one row of the table."""
    experts = read_model(ROOT / config.model.path).experts > 0
    spec = engine_spec(config, group, group.name, device="cuda", moe=experts)
    spec = replace(spec, model_path=str(started_from(config, group, directory)), port=30000)
    answers = resolved(server_args(spec), gpu)
    attention = answers["attention_backend"]
    by_phase = [answers[f"{phase}_attention_backend"] or attention for phase in ("prefill", "decode")]
    if attention == "dsa":
        by_phase = [f"dsa ({answers[f'dsa_{phase}_backend']})" for phase in ("prefill", "decode")]
    wrong = [] if gpu == "sm90" else [*unpublishable(answers, experts=experts, fp8=config.publish.quantize is not None)]
    return [
        f"`{stem}`" + (f", {group.name}" if len(config.served.policy) > 1 else ""),
        gpu,
        " / ".join(dict.fromkeys(by_phase)),
        answers["kv_cache_dtype"],
        answers["moe_runner_backend"] if experts else "-",
        answers["fp8_gemm_runner_backend"] if config.publish.quantize else "-",
        answers["moe_a2a_backend"] if experts else "-",
        answers["sampling_backend"],
        "NCCL's" if answers["disable_custom_all_reduce"] else "custom",
        f"no: `{wrong[0][0]}`" if wrong else "yes",
    ]


def rows(files: Sequence[Path]) -> Iterator[str]:
    """Yields the rows of configurations, each resolved in a fork of a process that has imported SGLang."""
    prepare(["--device", "cpu"])
    prepare_imports()
    import sglang.srt.server_args  # noqa: F401

    with tempfile.TemporaryDirectory() as directory:
        for file in files:
            config = load_config(file, [])
            for group in config.served.policy:
                for gpu in GPUS:
                    yield f"| {' | '.join(_in_fork(file.stem, config, group, gpu, Path(directory)))} |"


def _in_fork(stem: str, config: Config, group: Engines, gpu: str, directory: Path) -> list[str]:
    out = directory / "row.json"
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            out.write_text(json.dumps(cells(stem, config, group, gpu, directory)))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{stem}, {group.name}: SGLang did not resolve its arguments for {gpu}")
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="print the rows of these configurations")
    if files := parser.parse_args().rows:
        print(*rows(files), sep="\n")
        return
    table = f"{TITLE}{HEAD}" + "".join(f"{row}\n" for row in rows(SHIPPED))
    PAGE.write_text(re.sub(rf"{TITLE}\n.*?(?=\n## )", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
