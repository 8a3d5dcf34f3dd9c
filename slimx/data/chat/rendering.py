"""Renders chat templates on a short conversation within limits of CPU time and memory, to find templates that do not
terminate. `slimx.data.chat.template` runs this module as a separate process.

stdin: a JSON list of templates          exit status: 0 if every template terminates, by rendering or by an error
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable

from slimx.json_types import Json

CPU_S = 2
"""Limit on the CPU time of all renderings together, in seconds. A template takes milliseconds for the short
conversation `CHAT`."""
MEMORY_MIB = 4096
WORDS = "word " * 200
CHAT = [{"role": role, "content": WORDS} for role in ("user", "assistant", "user")]
TOOL: Json = {
    "type": "function",
    "function": {"name": "f", "description": WORDS, "parameters": {"type": "object"}},
}


def main() -> int:
    from transformers.utils.chat_template_utils import (
        render_jinja_template,  # imported before the limits apply
    )

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB << 20, MEMORY_MIB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tried: tuple[list[Json | Callable[..., object]] | None, ...] = (None, [TOOL])
    for template in json.load(sys.stdin):
        for tools in tried:
            try:
                render_jinja_template([CHAT], tools, chat_template=template, add_generation_prompt=True)
            except MemoryError:
                return 1
            except Exception:  # a template may raise any exception; `check_prompts` reports it
                continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
