"""Exceptions whose messages are meant for users, the exit statuses of commands that end with them, and the wording of
counts and durations in messages."""

import os
import signal
import sysconfig
import traceback
from pathlib import Path

REFUSED = 2
"""Exit status of a command that was refused and would fail again if repeated."""
LOST = os.EX_UNAVAILABLE
"""Exit status of a command that ended because a part of the run died or stopped responding. Repeating it resumes from
the newest checkpoint."""


_LIBRARIES = (
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    f"{Path(__file__).parent}{os.sep}",
)


class _Sentence(Exception):
    """An exception whose message is meant for users."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython and notebooks show instead of a traceback."""
        return [f"slimx: {ending_of(self)[1]}"]


class SlimxError(_Sentence):
    """An error whose message is one sentence for the user: what is wrong, where, and what to do.

    The command line prints only the message and exits with `status`; with `--debug` it also prints the traceback.

    `code` identifies the kind of error, such as "convert.dtype" (area and reason), and stays the same if the wording
    changes. `about` is the key, file or object at fault. Programs and tests check these two attributes, not the
    message.
    """

    status = REFUSED

    def __init__(self, sentence: str, *, code: str = "", about: str = ""):
        super().__init__(sentence)
        self.code = code
        self.about = about


class PartLost(SlimxError):
    """Error for a part of a run that has died or does not respond and cannot be replaced; `about` names the part."""

    status = LOST


class DeadlineError(SlimxError):
    """Error for a wait that exceeded its deadline. `awaited`: the awaited result or event; `seconds`: the deadline;
    `holder`: the part of the run that did not respond."""

    status = LOST

    def __init__(self, awaited: str, seconds: float, holder: str):
        sentence = f"waited {seconds:.0f} s for {awaited}; still waiting on {holder}"
        super().__init__(sentence, code="deadline", about=awaited)
        self.awaited = awaited
        self.seconds = seconds
        self.holder = holder

    def __reduce__(self) -> tuple[type, tuple[str, float, str]]:
        """Pickles all three arguments; by default an exception is pickled with its message alone."""
        return type(self), (self.awaited, self.seconds, self.holder)


def not_installed(module: str) -> SlimxError:
    """Returns the error of a command that needs `module`, a missing package, or a missing part of a broken package,
    that `slimx setup` installs."""
    return SlimxError(
        f"this command needs {module}, which is not installed; run `slimx setup`", code="setup.missing", about=module
    )


class Preempted(_Sentence):
    """Raised after a signal preempted the run, which has saved a checkpoint after `step` of its `steps` steps and shut
    down cleanly."""

    def __init__(self, step: int, steps: int):
        super().__init__(f"a signal after saving step {step} of {steps}; repeat the command to resume from there")
        self.step = step


class Interrupted(_Sentence):
    """Raised after a signal ended the run, which has shut down cleanly. `signum`: number of the signal."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def ending_of(error: BaseException | None) -> tuple[int, str]:
    """Returns the exit status and the message of a command that ends with `error`, which is None if the command
    succeeded."""
    if error is None:
        return 0, "done"
    if isinstance(error, SlimxError):
        return error.status, str(error)
    if isinstance(error, Preempted):
        return os.EX_TEMPFAIL, f"stopped by {error}"
    if isinstance(error, Interrupted):
        return 128 + error.signum, f"stopped by {error}"
    return 1, f"{type(error).__name__}: {error}"


def one_line(error: BaseException) -> str:
    """Returns the text of `error` on one line, truncated to 300 characters, or the name of its class if the text is
    empty."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def raised(error: BaseException) -> str:
    """Returns the type, message and location of an error in user code, such as "KeyError: 'nope' (/home/me/rewards.py,
    line 12)".

    The location is the innermost frame outside of Python, installed packages and slimx; it is omitted if there is no
    such frame."""
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
    except BaseException as second:  # a user's `__str__` may raise anything
        return f"(its message cannot be read: {type(second).__name__})"


def safe_repr(value: object) -> str:
    """Returns the `repr` of a value from user code, truncated to 200 characters. Never raises."""
    try:
        return repr(value)[:200]
    except BaseException as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def written_at(function: object) -> str:
    """Returns the location of a user's function, such as " (/home/me/rewards.py, line 12)"; "" for other functions."""
    code = getattr(function, "__code__", None)
    if code is None or not of_users(code.co_filename):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def of_users(file: str) -> bool:
    """Returns True if `file` is a Python file outside of Python itself, installed packages and slimx."""
    return file.endswith(".py") and not file.startswith((*_LIBRARIES, "<"))


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as "1 rank" or "1,024 ranks"."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def duration(seconds: float) -> str:
    """Returns a duration with three significant digits and a unit that fits it, such as "981 ms" or "2.15 h"."""
    # 0.9995 is 1 in three digits.
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))
    size, unit = next((unit for unit in units if abs(seconds) >= 0.9995 * unit[0]), units[3 + bool(seconds)])
    return f"{seconds / size:.3g} {unit}"


def first_line(error: BaseException) -> str:
    """Returns the first line of the text of `error`, without the log lines that it may quote."""
    return str(error).partition("\n")[0]
