#!/usr/bin/env bash
# A run on this machine alone, without a batch system: the node is checked, and slimx starts a Ray of its own.
#
#   scripts/launch/single_node.sh configs/moe/FILE.yaml model.path=/models/NAME run.dir=runs/NAME
#
# Settings: SLIMX_GPUS and others, common.sh; SLIMX_HEALTH: arguments of `slimx health`, or `none`. SIGUSR1 (kill -USR1)
# has the run save and leave with exit status 75; Ctrl-C and SIGTERM end it at once.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh
prepare_environment
: "${SLIMX_HEALTH:=--gpus $SLIMX_GPUS}"
if [[ $SLIMX_HEALTH != none ]]; then
  read -ra arguments <<< "$SLIMX_HEALTH"
  slimx health "${arguments[@]}"
fi
exec slimx train "$@"
