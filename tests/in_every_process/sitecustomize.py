"""Makes a Python process that a test starts, and its children, write their stacks when they are asked to.

tests/stacks.py puts this directory on PYTHONPATH, so that gloo ranks, Ray's workers, SGLang's servers and whatever they
start import it before anything else. faulthandler answers in C: also a process that hangs in a collective or holds the
interpreter's lock says where it is.
"""

import os

FOLDER = "SLIMX_TEST_STACKS"


def answer() -> None:
    """Answers the signal with the stacks of this process, in a file named by its id. A process without such a file is
    not signalled, as that would end it."""
    folder = os.environ.get(FOLDER, "")
    if os.path.isdir(folder):
        import faulthandler
        import signal

        # By number: an object would close its number when it is replaced, also where that is another file's by then.
        file = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # SIGUSR1 asks a run to make room, SIGUSR2 is Ray's; real-time signals are free.
        faulthandler.register(signal.SIGRTMAX - 1, file=file)


if FOLDER in os.environ:
    answer()
    os.register_at_fork(after_in_child=answer)
