"""slimx's server of verifiers with a taskset of this directory, in the environment that has the package:
python verifiers_program.py PORT; the taskset is the name of the directory that it is started in."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

SEATS = {"verifiers_adding": "agent", "verifiers_asking": "player"}

taskset = Path.cwd().name
here = Path(__file__).parent
os.environ["PYTHONPATH"] = str(here)  # of the processes of its tools
seat = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
env = {"taskset": {"id": taskset}, SEATS[taskset]: seat}
sys.argv[1:] = [json.dumps(env), "--port", sys.argv[1]]
runpy.run_path(str(here.parents[2] / "slimx/extras/agents/hubs/servers/verifiers_server.py"), run_name="__main__")
