"""A run inside a script or a notebook, which may have an event loop of its own."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slimx.errors import SlimxError
from slimx.runtime.tasks import without_loop


@contextmanager
def alone(*, signals: bool = True) -> Iterator[None]:
    """Lets the `with` block run an event loop, as `without_loop` does, which a notebook needs. `signals`: True if the
    block handles signals, which only the main thread can do. Raises SlimxError for such a block in another thread, and
    in a new process that still imports the script which started it."""
    # multiprocessing sets this attribute, by which it refuses to start processes at that time, too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SlimxError(
            "a worker process imports this script and would start the run again; put the call that starts the run "
            'under `if __name__ == "__main__":`',
            code="script.main",
            about="__main__",
        )
    thread = threading.current_thread()
    if signals and thread is not threading.main_thread():
        raise SlimxError(
            f"the thread {thread.name} starts a run, but only the main thread receives signals such as Ctrl-C; call "
            "slimx in the main thread",
            code="script.thread",
            about=thread.name,
        )
    with without_loop():
        yield
