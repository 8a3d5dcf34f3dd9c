"""A paused scheduler waits for messages, as an idle one does.

SGLang 0.5.23 waits where it is idle and was started with `--sleep-on-idle`; while it is paused it polls at full speed
all the same. Engines are paused through each publication, and for as long as trainers compute on the same devices: on a
core that these need.
"""

from __future__ import annotations

from typing import Any

TURN = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Called once in every turn of a paused scheduler's loop, and in no other."""


def wait(result: None, scheduler: Any) -> None:
    """After a turn of a paused scheduler: wait up to a second for the next message, if the server sleeps on idle.

    Only the rank that messages come to has an `idle_sleeper`; the others of its server wait for that one.
    """
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()
