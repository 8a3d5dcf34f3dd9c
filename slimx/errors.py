"""Exceptions meant for users, and the exit statuses of commands that end with them."""

import os
import signal
import sysconfig
import traceback
from pathlib import Path

REFUSED = 2
"""Exit status of a refusal: the same command would fail again."""
LOST = os.EX_UNAVAILABLE
"""Exit status if a part died or stopped responding: the same command resumes from the newest checkpoint."""


_LIBRARIES = (
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    f"{Path(__file__).parent}{os.sep}",
)


class SlimxError(Exception):
    """A refusal or failure in one sentence: the fault, where it is, and what to do.

    The command line prints only the sentence and exits with `status`; `--debug` adds the traceback.

    `code` names the kind of failure, such as "convert.dtype" (area and reason), and does not change with the wording.
    `about` is the key, file or object at fault. Programs and tests check these; people read the sentence.
    """

    status = REFUSED

    def __init__(self, sentence: str, *, code: str = "", about: str = ""):
        super().__init__(sentence)
        self.code = code
        self.about = about


class PartLost(SlimxError):
    """A part of a run that cannot be replaced has died or does not respond; `about` names it."""

    status = LOST


class DeadlineError(SlimxError):
    """A wait exceeded its deadline: what was awaited, for how long, and which part holds it."""

    status = LOST

    def __init__(self, awaited: str, seconds: float, holder: str):
        sentence = f"waited {seconds:.0f} s for {awaited}; it is held by {holder}"
        super().__init__(sentence, code="deadline", about=awaited)
        self.awaited = awaited
        self.seconds = seconds
        self.holder = holder

    def __reduce__(self) -> tuple[type, tuple[str, float, str]]:
        """Returns all three arguments for pickling between processes; an exception would pass the sentence alone."""
        return type(self), (self.awaited, self.seconds, self.holder)


class Preempted(Exception):
    """A signal preempted the run: it has saved a checkpoint after `step` steps and shut down cleanly."""

    def __init__(self, step: int, steps: int):
        super().__init__(f"a signal, step {step} of {steps} is saved: the same command resumes from there")
        self.step = step


class Interrupted(Exception):
    """A signal ended the run, which has shut down cleanly; `signum` is the signal's number."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def ending_of(error: BaseException | None) -> tuple[int, str]:
    """Returns the exit status and the sentence of a command that ends with `error`; None: it succeeded."""
    if error is None:
        return 0, "done"
    if isinstance(error, SlimxError):
        return error.status, str(error)
    if isinstance(error, Preempted):
        return os.EX_TEMPFAIL, f"stopped by {error}"
    if isinstance(error, Interrupted):
        return 128 + error.signum, f"stopped by {error}"
    return 1, f"{type(error).__name__}: {error}"


def raised(error: BaseException) -> str:
    """Returns type, message and location of an error in user code: "KeyError: 'nope' (/home/me/rewards.py, line 12)".

    The location is the innermost frame outside of Python, installed packages and slimx; omitted if there is none.
    """
    text = f"{type(error).__name__}: {_message(error)}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    in_user_code = [(file, line) for file, line in frames if of_users(file)]
    if not in_user_code:
        return text
    file, line = in_user_code[-1]
    return f"{text} ({file}, line {line})"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # raised by a user's `__str__`
        return f"(its text raised {type(second).__name__})"


def safe_repr(value: object) -> str:
    """Returns `repr` of a value of user code, cut at 200 characters; never raises."""
    try:
        return repr(value)[:200]
    except BaseException as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def written_at(function: object) -> str:
    """Returns the location of a user's function, as " (/home/me/rewards.py, line 12)"; "" for other functions."""
    code = getattr(function, "__code__", None)
    if code is None or not of_users(code.co_filename):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def of_users(file: str) -> bool:
    """Returns True for a Python file outside of Python itself, installed packages and slimx."""
    return file.endswith(".py") and not file.startswith((*_LIBRARIES, "<"))
