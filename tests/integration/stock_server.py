"""A stock SGLang server without the slimx plugin, for the test that it is refused."""

import os

from slimx.adapters.sglang import absent as sglang_absent

os.environ["SGLANG_PLUGINS"] = "none"
sglang_absent.install()

if __name__ == "__main__":
    import runpy
    import sys

    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
