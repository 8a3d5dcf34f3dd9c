"""Process entry of the router: `python -m slimx.engines.server.router_launch --keys - -- ARGUMENTS` of sglang-router.

The upstream launcher takes the key on the command line, where every user of the machine can read it, and imports SGLang
and torch for a load balancer in Python that slimx does not use."""

from __future__ import annotations

import argparse

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

from slimx.engines.server.keys import Keys

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m slimx.engines.server.router_launch", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--keys",
        required=True,
        metavar="FILE",
        help="JSON file with the api_key that requests must have; - means standard input",
    )
    parser.add_argument(
        "router", nargs=argparse.REMAINDER, help="--, followed by arguments of sglang_router.launch_router"
    )
    options = parser.parse_args()
    router_parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(router_parser)
    arguments = RouterArgs.from_cli_args(router_parser.parse_args(options.router[1:]))
    arguments.api_key = Keys.read(options.keys).api_key
    Router.from_args(arguments).start()
