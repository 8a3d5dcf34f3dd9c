"""`slimx convert`, also available as scripts in tools/convert/."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slimx.commands.usage import CommandGroup, PlainCommand
from slimx.errors import SlimxError, counted, duration
from slimx.json_types import Json

if TYPE_CHECKING:  # torch takes seconds to import, too long for --help
    from slimx.extras.convert.work import Conversion

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    help="Convert checkpoints slice by slice, with less than 2 GB of memory for any size. A conversion that was killed "
    "continues if the same command is run again; OUT appears only when it is complete.\n\nExamples:\n\n"
    "slimx convert hf-to-megatron models/Qwen3-30B-A3B models/Qwen3-30B-A3B-megatron\n\nPage: docs/conversion.md",
)
Source = Annotated[Path, typer.Argument(help="Directory of the checkpoint.")]
Out = Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")]
Dtype = Annotated[
    Literal["stored", "bfloat16", "float32"],
    typer.Option(help="Dtype of the weights in OUT; stored: as in SOURCE, with fp8 converted to bf16."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read the output again, check its checksums, and compare values with SOURCE.")
]
Threads = Annotated[
    int, typer.Option(min=1, max=1024, help="Number of files written in parallel; each needs about 250 MB of memory.")
]
FileSize = Annotated[float, typer.Option(min=1e-6, max=1e6, help="Approximate size of each file of the output in GB.")]
FamilyOption = Annotated[
    str, typer.Option("--family", help="Module of a model family that slimx does not include (docs/models.md).")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
THREADS = min(4, os.cpu_count() or 1)


@app.command(cls=PlainCommand)
def hf_to_megatron(
    source: Source,
    out: Out,
    dtype: Dtype = "stored",
    layout: Annotated[
        str,
        typer.Option(help="Parallel sizes of the job that will load OUT, e.g. tensor=8,pipeline=2."),
    ] = "",
    layers: Annotated[
        Literal["auto", "numbered", "stacked"],
        typer.Option(help="Keys of layers in OUT; auto: numbered for models with experts, else stacked."),
    ] = "auto",
    file_size: FileSize = 0.5,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Convert Hugging Face SOURCE to OUT, a torch_dist checkpoint of megatron-core (docs/conversion.md lists which
    system loads which family).

    Examples:

    slimx convert hf-to-megatron models/Qwen3-30B-A3B models/Qwen3-30B-A3B-megatron --layout tensor=4,expert=8

    Page: docs/conversion.md
    """
    _work(
        lambda run, options: run.hf_to_megatron(source, layout=layout, layers=layers, **options),
        out,
        dtype,
        file_size,
        family,
        threads,
        verify,
    )


@app.command(cls=PlainCommand)
def megatron_to_hf(
    source: Source,
    out: Out,
    original: Annotated[
        Path, typer.Option(help="Hugging Face directory with the model's config, tokenizer and frozen tensors.")
    ],
    dtype: Dtype = "stored",
    file_size: FileSize = 2,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Convert SOURCE, a torch_dist checkpoint of Megatron saved under any layout, to a Hugging Face directory OUT.

    Examples:

    slimx convert megatron-to-hf runs/first/checkpoints/iter_0000100 models/first --original models/Qwen3-30B-A3B

    Page: docs/conversion.md
    """
    _work(
        lambda run, options: run.megatron_to_hf(source, original, **options),
        out,
        dtype,
        file_size,
        family,
        threads,
        verify,
    )


@app.command(cls=PlainCommand)
def hf_to_fp8(
    source: Source,
    out: Out,
    rule: Annotated[
        Literal["ieee", "triton", "te", "ue8m0"],
        typer.Option(help="Rule of the scales (docs/numerics.md); ue8m0 for DeepGEMM on Blackwell."),
    ] = "ieee",
    dtype: Dtype = "stored",
    file_size: FileSize = 2,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Convert Hugging Face SOURCE to OUT in fp8 with blocks of 128 x 128, a format that SGLang loads.

    Examples:

    slimx convert hf-to-fp8 models/Qwen3-30B-A3B models/Qwen3-30B-A3B-fp8 --verify

    Page: docs/conversion.md
    """
    _work(
        lambda run, options: run.hf_to_fp8(source, rule=rule, **options),
        out,
        dtype,
        file_size,
        family,
        threads,
        verify,
    )


@app.command(cls=PlainCommand)
def hf_to_int4(
    source: Source,
    out: Out,
    dtype: Dtype = "stored",
    file_size: FileSize = 2,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Convert Hugging Face SOURCE to OUT with routed experts in INT4, in groups of 32, in compressed-tensors'
    format.

    Examples:

    slimx convert hf-to-int4 models/Qwen3-30B-A3B models/Qwen3-30B-A3B-int4

    Page: docs/conversion.md
    """
    _work(lambda run, options: run.hf_to_int4(source, **options), out, dtype, file_size, family, threads, verify)


@app.command(cls=PlainCommand)
def adapters_to_peft(
    source: Annotated[Path, typer.Argument(help="RUN/checkpoints of a run with trainer.lora.")],
    out: Out,
    original: Annotated[Path, typer.Option(help="Hugging Face directory of the base model.")],
    debug: Debug = False,
) -> None:
    """Convert the LoRA adapters of SOURCE to OUT, a directory that the package peft loads on top of the base model.

    Examples:

    slimx convert adapters-to-peft runs/lora/checkpoints models/adapters --original models/Qwen3-30B-A3B

    Page: docs/lora.md
    """
    from slimx.config.sections.policies import ACTOR
    from slimx.extras.convert.formats.peft import export_adapters
    from slimx.extras.megatron_files.directory import find_checkpoint
    from slimx.orchestration.state.saves import read_state

    lora = read_state(find_checkpoint(source)).policies[ACTOR]["lora"]
    if lora is None:
        raise SlimxError(
            f"{source} contains no adapters, because the run did not set trainer.lora; convert the full weights with "
            "`slimx convert megatron-to-hf` instead",
            code="convert.no_adapters",
            about=str(source),
        )
    count = export_adapters(source, out, original, lora["alpha"])
    Console(soft_wrap=True).print(f"{out}: adapters of rank {lora['rank']}, {count:,} parameters", highlight=False)


def _work(
    plan: Callable[[ModuleType, Json], Conversion],
    out: Path,
    dtype: str,
    file_size: float,
    family: str,
    threads: int,
    verify: bool,
) -> None:
    """Runs a conversion. `plan` receives the module `slimx.extras.convert.run` and the common options, and returns the
    planned conversion. Raises SlimxError for an OS error during input or output."""
    import torch

    from slimx.extras.convert import run
    from slimx.extras.convert.work import convert
    from slimx.models.families import load_family

    options = {
        "dtype": None if dtype == "stored" else getattr(torch, dtype),
        "file_bytes": int(file_size * 1e9),
        "family": load_family(family, "--family") if family else None,
    }
    torch.set_num_threads(1)  # several threads write files, so torch itself uses one
    try:
        conversion = plan(run, options)
    except OSError as error:
        raise SlimxError(
            f"{error.filename} cannot be read ({error.strerror}); give a path that exists and that this user is "
            "allowed to read",
            code="convert.system",
            about=str(error.filename),
        ) from error
    begin = time.monotonic()
    console = Console(soft_wrap=True)
    with Bar(console) as bar:
        files = convert(conversion, out, threads=threads, verify=verify, progress=bar)
    size = sum(file.size for file in files.values())
    seconds = time.monotonic() - begin
    suffix = ", verified" if verify else ""
    console.print(
        f"{out}: {counted(len(files), 'file')}, {decimal(size)} in {duration(seconds)} "
        f"({decimal(round(size / seconds))}/s{suffix})",
        highlight=False,
        soft_wrap=True,
    )


class Bar(Progress):
    """`slimx.extras.convert.work.ProgressListener` that draws a progress bar on a console, or nothing if the console is
    not a terminal."""

    def __init__(self, console: Console):
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal)

    def begin(self, label: str, total: int, done: int) -> None:
        """Starts a new bar for a part of the conversion. Bytes that an earlier attempt finished count as done, but are
        not included in the displayed speed."""
        self._part = self.add_task(label, total=total)
        if done:
            self.update(self._part, completed=done)
            self.reset(self._part, completed=done)

    def add(self, nbytes: int) -> None:
        self.advance(self._part, nbytes)
