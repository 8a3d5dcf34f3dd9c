"""A stock SGLang server without the slimx plugin, for the test that it is refused."""

import multiprocessing
import os

from slimx.extras.cpu.adapters import absent as sglang_absent

os.environ["SGLANG_PLUGINS"] = "none"
sglang_absent.install()

if __name__ == "__main__":
    import runpy
    import sys

    set_start_method = multiprocessing.set_start_method
    # It chooses to spawn its other processes, which would import everything again, 5 to 9 s of a core each.
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=True)
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
