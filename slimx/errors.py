"""The exceptions that a user is meant to read, and the exit statuses that they end a command with."""

import os
import signal
import sysconfig
import traceback
from pathlib import Path

REFUSED, LOST = 2, os.EX_UNAVAILABLE
"""Exit statuses: starting again changes nothing; or a part was lost or silent, and the same command goes on from the
newest checkpoint."""


_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), Path(__file__).parent)
)


class SlimxError(Exception):
    """A refusal or failure told in one sentence: the offending thing, where it is, and what to do.

    The command line prints the sentence alone and ends with `status`; `--debug` adds the traceback.

    `code` names the kind of refusal and does not change with the wording: room and reason, such as "convert.dtype".
    `about` is the key, file or object that the sentence is about. Programs and tests ask for these, people read the
    sentence.
    """

    status = REFUSED

    def __init__(self, sentence: str, *, code: str = "", about: str = ""):
        super().__init__(sentence)
        self.code, self.about = code, about


class PartLost(SlimxError):
    """A part of a run that cannot be replaced while it runs has died, or is silent; `about` names it."""

    status = LOST


class DeadlineError(SlimxError):
    """A wait that ran past its deadline: says what was awaited, for how long, and who holds it."""

    status = LOST

    def __init__(self, awaited: str, seconds: float, holder: str):
        sentence = f"waited {seconds:.0f} s for {awaited}; it is held by {holder}"
        super().__init__(sentence, code="deadline", about=awaited)
        self.awaited, self.seconds, self.holder = awaited, seconds, holder

    def __reduce__(self) -> tuple[type, tuple[str, float, str]]:
        """Errors of other processes arrive pickled, and an exception's own way would pass the sentence alone."""
        return type(self), (self.awaited, self.seconds, self.holder)


class Preempted(Exception):
    """A signal asked the run to make room: it has written a checkpoint after `step` steps, and ended in order."""

    def __init__(self, step: int, steps: int):
        super().__init__(f"a signal, step {step} of {steps} is saved: the same command goes on from there")
        self.step = step


class Interrupted(Exception):
    """A signal asked the run to end, and it has ended in order; `signum` is the signal's number."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def ending_of(error: BaseException | None) -> tuple[int, str]:
    """Exit status and sentence of a command that `error` ends; None: nothing has gone wrong."""
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
    """Kind, words and place of an error in a user's code: "KeyError: 'nope' (/home/me/rewards.py, line 12)".

    The place is the innermost one outside of Python, of installed packages and of slimx; left out where all are inside.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if of_users(place[0])]
    return f"{type(error).__name__}: {_words(error)}" + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # a user's own __str__
        return f"(its text raised {type(second).__name__})"


def safe_repr(value: object) -> str:
    """`repr` of a value of a user's code, cut at 200 characters, whatever it raises."""
    try:
        return repr(value)[:200]
    except BaseException as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def written_at(function: object) -> str:
    """The place of a user's function, as " (/home/me/rewards.py, line 12)"; "" for one of a library or of slimx."""
    code = getattr(function, "__code__", None)
    if code is None or not of_users(code.co_filename):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def of_users(file: str) -> bool:
    """True for a file of Python outside of Python itself, of installed packages and of slimx."""
    return file.endswith(".py") and not file.startswith((*_LIBRARIES, "<"))
