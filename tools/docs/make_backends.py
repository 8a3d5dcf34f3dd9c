"""Write the table of docs/engines.md: the kernels that SGLang chooses for the engines of every shipped configuration.

    python -m tools.docs.make_backends                  writes the table
    python -m tools.docs.make_backends --rows FILE...   prints the rows of single configurations

No GPU is needed: SGLang resolves a server's arguments by rules that ask for facts of the machine, and is told those of
Hopper and of Blackwell (`override_platform`, its own). A unit test compares rows with the table, so run this after a
change of a configuration or of the pinned SGLang; it takes two minutes.
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
from slimx.extras.convert.formats.fp8 import with_quantisation
from slimx.extras.low_precision.block_fp8 import quantisation
from slimx.layout.kernels import unpublishable
from slimx.models.families import read_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
SHIPPED = [
    file
    for file in sorted(ROOT.glob("configs/moe/*.yaml"))
    if not file.stem.startswith(("quickstart", "ling-flash-2.0"))
]
"""Configurations of the table."""
TITLE = "## What SGLang resolves"
HEAD = """

This table is made by `python -m tools.docs.make_backends`. SGLang 0.5.23 was told the facts of an H100 (sm90) and of a
GB300 (sm103) and resolved the arguments of each group that is published to; nothing ran on either. `auto` is decided
where a layer is built: for experts Triton's kernels, DeepGEMM's behind DeepEP; for fp8 linears DeepGEMM where it is
installed. The last column is slimx's answer: what it could not publish to verifiably is refused, here only rows of a
GPU that the file does not name. Ling is not here: its configuration is Python code that comes with the checkpoint.

| engines of | GPU | attention | KV cache | experts | fp8 linears | all-to-all | sampler | all-reduce | taken |
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
"""Facts of SGLang's PlatformContext that hold; others of `NO` do not."""
NO = dict.fromkeys(
    ("is_sm90", "is_hopper_with_cuda_12_3", "is_sm100", "is_sm100_or_sm110", "is_sm110", "is_sm120", "is_blackwell"),
    False,
)


def resolved(arguments: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The arguments of a server after SGLang has resolved them for `gpu`. For a process of its own: it stays so."""
    import torch
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    override_platform(is_cuda=True, has_flashinfer=True, **NO | GPUS[gpu]).install()
    torch.cuda.get_device_capability = lambda *_: GPUS[gpu]["device_capability"]
    answer = ServerArgs(**{name: value for name, value in arguments.items() if value is not None})
    answer.resolve_once()
    return answer.resolved_dict()


def started_from(config: Config, group: Engines, directory: Path) -> Path:
    """A directory with the config.json that the group's engines start from, also where the user makes the fp8 copy."""
    hf = json.loads((ROOT / config.model.path / "config.json").read_text())
    if config.publish.quantise and "quantization_config" not in hf:
        hf = with_quantisation(hf, quantisation(config.publish.quantise), [])
    path = directory / (group.model or config.model.path).replace("/", "-")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    return path


def cells(stem: str, config: Config, group: Engines, gpu: str, directory: Path) -> list[str]:
    """One row of the table."""
    experts = read_model(ROOT / config.model.path).experts > 0
    spec = engine_spec(config, group, group.name, device="cuda", moe=experts)
    spec = replace(spec, model_path=str(started_from(config, group, directory)), port=30000)
    said = resolved(server_args(spec), gpu)
    attention = said["attention_backend"]
    by_phase = [said[f"{phase}_attention_backend"] or attention for phase in ("prefill", "decode")]
    if attention == "dsa":
        by_phase = [f"dsa ({said[f'dsa_{phase}_backend']})" for phase in ("prefill", "decode")]
    wrong = [] if gpu == "sm90" else [*unpublishable(said, experts=experts, fp8=config.publish.quantise is not None)]
    return [
        f"`{stem}`" + (f", {group.name}" if len(config.rollout.policy_engines) > 1 else ""),
        gpu,
        " / ".join(dict.fromkeys(by_phase)),
        said["kv_cache_dtype"],
        said["moe_runner_backend"] if experts else "-",
        said["fp8_gemm_runner_backend"] if config.publish.quantise else "-",
        said["moe_a2a_backend"] if experts else "-",
        said["sampling_backend"],
        "NCCL's" if said["disable_custom_all_reduce"] else "custom",
        f"no: `{wrong[0][0]}`" if wrong else "yes",
    ]


def rows(files: Sequence[Path]) -> Iterator[str]:
    """Rows of configurations, each resolved in a fork of a process that has imported SGLang."""
    prepare(["--device", "cpu"])
    prepare_imports()
    import sglang.srt.server_args  # noqa: F401

    with tempfile.TemporaryDirectory() as directory:
        for file in files:
            config = load_config(file, [])
            for group in config.rollout.policy_engines:
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
