#!/usr/bin/env bash
# Whether this node of a Slurm job is fit for the run: `slimx health`, its findings in JOB_DIR/health/NODE, and the line
# `fit` there if it is. usage (by slurm.sh, on every node): check_node.sh [argument of slimx health ...]
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh
: "${JOB_DIR:?}" "${SLURMD_NODENAME:?}"
prepare_environment
slimx health "$@" > "$JOB_DIR/health/$SLURMD_NODENAME" 2>&1 && echo fit >> "$JOB_DIR/health/$SLURMD_NODENAME"
