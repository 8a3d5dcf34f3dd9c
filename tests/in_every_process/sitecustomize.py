"""Makes a Python process that a test starts, and its children, write their stacks when they are asked to.

tests/stacks.py puts this directory on PYTHONPATH, so that gloo ranks, Ray's workers, SGLang's servers and whatever they
start import it before anything else. faulthandler answers in C: also a process that hangs in a collective or holds the
interpreter's lock says where it is.
"""

import os

if folder := os.environ.get("SLIMX_TEST_STACKS"):
    import faulthandler
    import signal

    # SIGUSR1 asks a run to make room, SIGUSR2 is Ray's: real-time signals are nobody's.
    ASK = signal.SIGRTMAX - 1

    def answer() -> None:
        """Answer signals with the stack, in a file named by the process id: a signal then goes to nobody who would die
        of it."""
        if os.path.isdir(folder):
            file = open(os.path.join(folder, str(os.getpid())), "w")  # noqa: SIM115 (it stays open)
            faulthandler.register(ASK, file=file)

    answer()
    os.register_at_fork(after_in_child=answer)
else:

    def answer() -> None:
        """Nothing asks."""
