"""`slimx convert`, and the same as scripts in tools/convert/."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slimx.commands.usage import CommandGroup
from slimx.errors import SlimxError

if TYPE_CHECKING:  # torch takes seconds to import, --help must not
    from slimx.extras.convert.work import Conversion

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    help="Convert checkpoints, slice by slice: memory stays below 2 GB whatever their size. A conversion that was "
    "killed goes on where it was when it is started again; the output appears when it is complete.",
)
Source = Annotated[Path, typer.Argument(help="Directory of the checkpoint.")]
Out = Annotated[Path, typer.Argument(help="Directory to make; it must not exist.")]
Dtype = Annotated[
    Literal["stored", "bfloat16", "float32"],
    typer.Option(help="Of the model; stored: as the source has it, fp8 as bf16."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read the output again: its checksums, and its values with the source's.")
]
Threads = Annotated[
    int, typer.Option(min=1, max=1024, help="Files written at once; each needs about 250 MB of memory.")
]
FileSize = Annotated[float, typer.Option(min=1e-6, max=1e6, help="About the size of a file in GB.")]
FamilyOption = Annotated[
    str, typer.Option("--family", help="Module of a family that slimx does not bring: docs/models.md.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
THREADS = min(4, os.cpu_count() or 1)


@app.command()
def hf_to_megatron(
    source: Source,
    out: Out,
    dtype: Dtype = "stored",
    layout: Annotated[
        str,
        typer.Option(
            help="Parallel sizes that will read it, such as tensor=8,pipeline=2,expert=8: each rank then reads files "
            "of its own. Any other layout can load it too."
        ),
    ] = "",
    layers: Annotated[
        Literal["auto", "numbered", "stacked"],
        typer.Option(
            help="Keys of its layers: numbered (slime and Miles want it of models with experts), or stacked under one "
            "key; auto: numbered with experts, else stacked."
        ),
    ] = "auto",
    file_size: FileSize = 0.5,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Hugging Face SOURCE to OUT, a torch_dist checkpoint of megatron-core (docs/conversion.md: which system loads
    which family)."""
    _work(
        lambda run, given: run.hf_to_megatron(source, layout=layout, layers=layers, **given),
        out,
        dtype,
        file_size,
        family,
        threads,
        verify,
    )


@app.command()
def megatron_to_hf(
    source: Source,
    out: Out,
    original: Annotated[
        Path, typer.Option(help="Hugging Face directory of the model: its config, tokenizer and frozen tensors.")
    ],
    dtype: Dtype = "stored",
    file_size: FileSize = 2,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Megatron's torch_dist SOURCE, saved under any layout, to a Hugging Face directory OUT."""
    _work(
        lambda run, given: run.megatron_to_hf(source, original, **given), out, dtype, file_size, family, threads, verify
    )


@app.command()
def hf_to_fp8(
    source: Source,
    out: Out,
    rule: Annotated[
        Literal["ieee", "triton", "te", "ue8m0"],
        typer.Option(help="How scales are chosen (docs/numerics.md); ue8m0 for DeepGEMM on Blackwell."),
    ] = "ieee",
    dtype: Dtype = "stored",
    file_size: FileSize = 2,
    verify: Verify = False,
    threads: Threads = THREADS,
    family: FamilyOption = "",
    debug: Debug = False,
) -> None:
    """Hugging Face SOURCE to OUT in fp8 with blocks of 128 x 128, which SGLang loads."""
    _work(lambda run, given: run.hf_to_fp8(source, rule=rule, **given), out, dtype, file_size, family, threads, verify)


@app.command()
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
    """Hugging Face SOURCE to OUT with routed experts in INT4, groups of 32, as compressed-tensors stores them."""
    _work(lambda run, given: run.hf_to_int4(source, **given), out, dtype, file_size, family, threads, verify)


@app.command()
def adapters_to_peft(
    source: Annotated[Path, typer.Argument(help="RUN/checkpoints of a run with trainer.lora.")],
    out: Out,
    original: Annotated[Path, typer.Option(help="Hugging Face directory of the base.")],
    debug: Debug = False,
) -> None:
    """Low-rank adapters of SOURCE to OUT, a directory that the package peft loads beside the base."""
    from slimx.config.sections.policies import ACTOR
    from slimx.extras.convert.formats.peft import export_adapters
    from slimx.extras.megatron_files.directory import find_checkpoint
    from slimx.orchestration.state.saves import read_state

    lora = read_state(find_checkpoint(source)).policies[ACTOR]["lora"]
    if lora is None:
        raise SlimxError(
            f"{source} is of a run without trainer.lora and holds no adapters; take its weights by `slimx convert "
            "megatron-to-hf`",
            code="convert.no_adapters",
            about=str(source),
        )
    count = export_adapters(source, out, original, lora["alpha"])
    Console(soft_wrap=True).print(f"{out}: {count:,} parameters of adapters, rank {lora['rank']}", highlight=False)


def _work(
    plan: Callable[..., Conversion], out: Path, dtype: str, file_size: float, family: str, threads: int, verify: bool
) -> None:
    """Plan and run a conversion; `plan` gets the module `run`, and the options that all have. What the system refuses
    of its input is said in one sentence, as of its output."""
    import torch

    from slimx.extras.convert import run
    from slimx.extras.convert.work import convert
    from slimx.models.families import load_family

    given = {
        "dtype": None if dtype == "stored" else getattr(torch, dtype),
        "file_bytes": int(file_size * 1e9),
        "family": load_family(family, "--family") if family else None,
    }
    torch.set_num_threads(1)  # files are written by threads of our own
    try:
        conversion = plan(run, given)
    except OSError as error:
        raise SlimxError(
            f"{error.filename}: cannot be read ({error.strerror})", code="convert.system", about=str(error.filename)
        ) from error
    begin, console = time.monotonic(), Console(soft_wrap=True)
    with Bar(console) as bar:
        files = convert(conversion, out, threads=threads, verify=verify, progress=bar)
    size, seconds = sum(one.size for one in files.values()), time.monotonic() - begin
    checked = ", verified" if verify else ""
    console.print(
        f"{out}: {len(files)} files, {size / 1e9:.2f} GB in {seconds:.1f} s ({size / 1e9 / seconds:.2f} GB/s{checked})",
        highlight=False,
        soft_wrap=True,
    )


class Bar(Progress):
    """A `slimx.extras.convert.work.Account` on a console; silent where that is no terminal."""

    def __init__(self, console: Console):
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal)

    def begin(self, what: str, total: int, done: int) -> None:
        """Begin; what an earlier try has done counts as done, not as fast."""
        self._part = self.add_task(what, total=total)
        if done:
            self.update(self._part, completed=done)
            self.reset(self._part, completed=done)

    def add(self, nbytes: int) -> None:
        self.advance(self._part, nbytes)
