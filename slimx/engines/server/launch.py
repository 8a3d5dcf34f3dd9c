"""Process entry of an engine, a stock SGLang server: `python -m slimx.engines.server.launch [--parent PID]
[--publish-draft] [--spawn] [--keys FILE] -- ARGUMENTS`; modes of numerics and forms of weights have options, too
(`NumericsMode.OPTION`, `WeightForm.OPTION`).

On a GPU SGLang starts its scheduler and detokenizer by multiprocessing's spawn, which runs this file again as
`__mp_main__`: what must stand before `import sglang` stands at the top level here, and stays cheap. On the CPU they are
forked (slimx.adapters.sglang.plugin).
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys

from slimx import entry_points
from slimx.adapters.device import device_named
from slimx.adapters.transformers import import_transformers
from slimx.engines.server.keys import Keys
from slimx.layout import form
from slimx.numerics import mode
from slimx.runtime.allocator import drop_expandable_segments
from slimx.runtime.children import search_working_directory
from slimx.runtime.process import end_with_parent
from slimx.runtime.toolkit import set_build_tools

CPU_VARIABLES = {
    # SGLang's own: its modules ask for the device while they are imported, before arguments are parsed.
    "SGLANG_USE_CPU_ENGINE": "1",
    # torch's own: inductor would run a compiler for small functions, and gain nothing here.
    "TORCHDYNAMO_DISABLE": "1",
    # SGLang's own: ranks would meet through the NCCL of a CUDA build of torch, which finds no GPU here.
    "SGLANG_NCCL_SO_PATH": "none",
}
MODELS = "slimx.adapters.sglang.models"


def prepare(arguments: list[str]) -> None:
    """Set SGLang's and torch's variables for this process and its children, from SGLang's arguments."""
    named = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    os.environ["SGLANG_PLUGINS"] = ",".join(dict.fromkeys(["slimx", *named]))
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS)
    # The router asks for /health before it takes an engine in. SGLang would generate a token for that, which takes 1 s,
    # and for ever while it is paused. Whether an engine generates, slimx asks itself (/health_generate).
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    # Set for trainers, where Ray was started; SGLang's memory saver and its KV transfer refuse to start with it.
    drop_expandable_segments(os.environ)
    if ("--device", "cpu") in zip(arguments, arguments[1:], strict=False) or "--device=cpu" in arguments:
        os.environ.update(CPU_VARIABLES)
    else:
        set_build_tools(os.environ)


def prepare_imports() -> None:
    """Hide megatron-core, import transformers and put stand-ins for absent GPU packages, before SGLang's first
    import."""
    # SGLang's dumper of tensors, which trainers use too, imports megatron-core if it can: a second for nothing here.
    sys.modules["megatron"] = None
    import_transformers()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":  # on a GPU nothing may be absent
        device_named("cpu").prepare_sglang()


def main(arguments: list[str], keys: Keys) -> None:
    """Run the server until it is told to stop; its children end with it."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        server_args = prepare_server_args([*arguments, *keys.flags()])
        server_args._launch_command = shlex.join(arguments)  # which /server_info tells, with the keys in it
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    # SGLang sets this too, but only after some seconds of imports; a parent lost in between would leave an orphan.
    end_with_parent(os.getppid(), signal.SIGKILL)
    prepare_imports()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m slimx.engines.server.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--parent", type=int, help="end when this process, the direct parent, ends")
    for kind in (*entry_points.load_all(mode.GROUP).values(), *entry_points.load_all(form.GROUP).values()):
        if kind.OPTION is not None:
            parser.add_argument(kind.OPTION, type=kind.parse, metavar="VALUE", help=kind.__doc__)
    parser.add_argument(
        "--publish-draft",
        action="store_true",
        help="receive the weights of the draft model, too; read by the plugin",
    )
    parser.add_argument(
        "--spawn",
        action="store_true",
        help="start SGLang's other processes on the CPU as on a GPU; read by the plugin",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help='JSON of the keys that requests need, {"api_key": "...", "admin_api_key": "..."}, readable by its owner '
        "alone; -: standard input",
    )
    parser.add_argument("sglang", nargs=argparse.REMAINDER, help="-- and then arguments of sglang.launch_server")
    options = parser.parse_args()
    if options.parent is not None:
        end_with_parent(options.parent, signal.SIGTERM)
    search_working_directory()  # a package of models may lie there
    given = options.sglang[1:] if options.sglang[:1] == ["--"] else options.sglang
    prepare(given)
    prepare_imports()
    sys.exit(main(given, Keys() if options.keys is None else Keys.read(options.keys)))
