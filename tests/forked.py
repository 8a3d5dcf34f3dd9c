"""The end of a process that was forked to run one program."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run `program` in this process, and end with the exit status that Python would give it."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
