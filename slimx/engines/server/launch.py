"""Process entry of an engine, a stock SGLang server: `python -m slimx.engines.server.launch [--parent PID]
[--publish-draft] [--spawn] [--keys FILE] -- ARGUMENTS`. Numerics modes and weight forms, such as LoRA adapters, add
options (`NumericsMode.OPTION`, `WeightForm.OPTION`).

On a GPU SGLang spawns its scheduler and detokenizer, which run this file again as `__mp_main__`. Preparations for
`import sglang` are therefore at the top level, and cheap. On the CPU these processes are forked
(slimx.adapters.sglang.plugin).
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
    # Read by SGLang, whose modules query the device during import, before arguments are parsed.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Read by torch, whose inductor would otherwise compile small functions without any gain.
    "TORCHDYNAMO_DISABLE": "1",
    # Read by SGLang, whose ranks would otherwise rendezvous through NCCL if torch is a CUDA build, and find no GPU.
    "SGLANG_NCCL_SO_PATH": "none",
}
MODELS = "slimx.adapters.sglang.models"


def prepare(arguments: list[str]) -> None:
    """Sets environment variables for SGLang and torch in this process and its children.

    `arguments`: SGLang's arguments, from which the device is read."""
    named = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    os.environ["SGLANG_PLUGINS"] = ",".join(dict.fromkeys(["slimx", *named]))
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS)
    os.environ.setdefault(
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", entry_points.find("slimx.engine_processors")["images"].value
    )
    # The router calls /health before it accepts an engine. SGLang would generate a token in response, which takes 1 s
    # and never ends while the engine is paused. slimx checks generation itself (/health_generate).
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    # Inherited from Ray, where it is set for trainers; SGLang's memory saver and KV transfer refuse to start with it.
    drop_expandable_segments(os.environ)
    if ("--device", "cpu") in zip(arguments, arguments[1:], strict=False) or "--device=cpu" in arguments:
        os.environ.update(CPU_VARIABLES)
    else:
        set_build_tools(os.environ)


def prepare_imports() -> None:
    """Prepares `import sglang`: prevents it from importing megatron-core, imports transformers, and on the CPU installs
    stand-ins for absent GPU packages."""
    # SGLang's tensor dumper imports megatron-core if it is installed, which costs an engine a second for nothing.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # None makes the import fail
    import_transformers()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":  # on a GPU all packages must be installed
        device_named("cpu").prepare_sglang()


def main(arguments: list[str], keys: Keys) -> None:
    """Runs the server with SGLang's `arguments` until it is stopped; its child processes are killed with it."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        server_args = prepare_server_args([*arguments, *keys.flags()])
        server_args._launch_command = shlex.join(arguments)  # /server_info shows it, so it must not contain the keys
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    # SGLang does this too, but only after some seconds of imports; if the parent died before, a process would remain.
    end_with_parent(os.getppid(), signal.SIGKILL)
    prepare_imports()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m slimx.engines.server.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--parent", type=int, help="PID of the parent process; the server exits when that process ends")
    for kind in (*entry_points.load_all(mode.GROUP).values(), *entry_points.load_all(form.GROUP).values()):
        if kind.OPTION is not None:
            parser.add_argument(kind.OPTION, type=kind.parse, metavar="VALUE", help=kind.__doc__)
    parser.add_argument(
        "--publish-draft",
        action="store_true",
        help="make publications include the weights of the draft model; read by the slimx plugin",
    )
    parser.add_argument(
        "--spawn",
        action="store_true",
        help="on the CPU, spawn SGLang's other processes instead of forking them; read by the slimx plugin",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help='JSON file with the keys that requests must have, {"api_key": "...", "admin_api_key": "..."}, readable '
        "only by its owner; - means standard input; by default no key is required",
    )
    parser.add_argument("sglang", nargs=argparse.REMAINDER, help="--, followed by arguments of sglang.launch_server")
    options = parser.parse_args()
    if options.parent is not None:
        end_with_parent(options.parent, signal.SIGTERM)
    search_working_directory()  # it may contain a user's package of models
    arguments = options.sglang
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    prepare(arguments)
    prepare_imports()
    main(arguments, Keys() if options.keys is None else Keys.read(options.keys))
