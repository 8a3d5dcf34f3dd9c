#!/usr/bin/env bash
# A user's first ten minutes on a GPU node: does all of slimx work here? One table, and exit status 1 if a line failed.
#
#   scripts/launch/smoke_8gpu.sh                          # 8 GPUs: 4 train, 4 serve a tiny model that is made here
#   scripts/launch/smoke_8gpu.sh --model /models/Qwen3-30B-A3B
#   scripts/launch/smoke_8gpu.sh --device cpu --trainers 2 --engines 2      # the same without GPUs
#
# `--help` lists the options, tools/smoke/check.py is what it does.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh
SLIMX_ADDRESS=${SLIMX_ADDRESS:-127.0.0.1} # all of it is on this machine
prepare_environment
exec python -m tools.smoke.check "$@"
