"""Programs of Python in the process that has been forked for them."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def execute(words: Sequence[str]) -> None:
    """Execute ["-m", MODULE, ...], ["-c", TEXT, ...] or [FILE, ...] in this process, as the module `__main__`."""
    # Multiprocessing has the second name for what its children call so.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module = ModuleType("__main__")
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{words[1]}.__main__")
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        sys.argv, code = [spec.origin, *words[2:]], spec.loader.get_code(spec.name)
    elif words[0] == "-c":
        sys.argv, code = ["-c", *words[2:]], compile(words[1], "-c", "exec")
    else:
        module.__file__ = words[0]
        sys.argv, code = list(words), compile(Path(words[0]).read_bytes(), words[0], "exec")
        sys.path.insert(0, os.path.dirname(words[0]))
    exec(code, vars(module))


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run `program` in this process, and end with the exit status that Python would give it."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
