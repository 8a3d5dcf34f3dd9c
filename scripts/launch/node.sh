#!/usr/bin/env bash
# One node's part of a run over several: Ray on every node, and on node 0, once all have joined, the driver.
#
# usage, on every node at about the same time, from the root of the repository:
#   NODE_RANK=0 NODES=2 JOB_DIR=/shared/job scripts/launch/node.sh FILE [section.key=value ...]
#
# Under Slurm the first two are its own. JOB_DIR is a directory that all nodes see, new for each start. The first node
# writes there where Ray is (`head`), its secret (`token`) and, at the end, the driver's exit status (`over`), which ends
# the other nodes. SIGUSR1 to the first has the driver save and leave (exit status 75), SIGTERM has it leave at once; a
# launcher that cannot signal this script alone writes the signal's name there (`asked`: USR1). Whatever the way out,
# nothing of Ray is left on a node. More settings: common.sh.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/launch/common.sh
: "${NODE_RANK:=${SLURM_PROCID:?}}" "${NODES:=${SLURM_NTASKS:?}}" "${JOB_DIR:?}"
NODE_NAME=${SLURMD_NODENAME:-$(hostname)}-$NODE_RANK
ray_pid='' driver_pid='' starting='' asked=''
# Sockets lie in there, whose paths may have 107 characters.
temporary=$(mktemp -d /tmp/slimx-ray.XXXXXX)

leave() {
  trap '' TERM INT USR1
  [[ -z $driver_pid ]] || end "$driver_pid" "$SLIMX_STOP_S"
  [[ -z $ray_pid ]] || end "$ray_pid" "$SLIMX_STOP_S"
  mkdir -p "$JOB_DIR/ray/$NODE_NAME"
  cp -r "$temporary"/session_2*/logs/. "$JOB_DIR/ray/$NODE_NAME/" 2> /dev/null || true
  rm -rf "$temporary"
}
trap leave EXIT

# A signal that comes before there is a driver ends the node; afterwards the driver's own end does.
tell_driver() {
  asked=$1
  if [[ -n $driver_pid ]]; then
    kill -"$1" "$driver_pid" 2> /dev/null || true
  elif [[ -z $starting ]]; then
    finish $((128 + $(kill -l "$1")))
  fi
}

main() {
  prepare_environment
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$JOB_DIR/token"
  if ((NODE_RANK == 0)); then be_head "$@"; else be_worker; fi
}

# Sessions of their own keep Ctrl-C from Ray and the driver: this script ends them in order.
start_ray() {
  local -a arguments
  mapfile -t arguments < <(ray_arguments "$NODE_RANK")
  setsid ray start "${arguments[@]}" --temp-dir="$temporary" "$@" > "$JOB_DIR/ray-$NODE_NAME.log" 2>&1 &
  ray_pid=$!
}

be_head() {
  local port client address status=0
  trap 'tell_driver USR1' USR1
  trap 'tell_driver TERM' TERM INT
  make_token "$JOB_DIR/token"
  read -r port client < <(free_ports "$NODE_ADDRESS" 2)
  address=$(in_url "$NODE_ADDRESS"):$port
  spare_proxy "$NODE_ADDRESS"
  # A dying worker must not kill its children, the guard of an engine among them, which ends the engine in order. The
  # driver finds a lost GCS itself, and must have the time to say so.
  start_ray --head --port="$port" --ray-client-server-port="$client" --include-dashboard=false \
    --system-config='{"kill_child_processes_on_worker_exit": false, "gcs_rpc_server_reconnect_timeout_s": 600}'
  await "$SLIMX_JOIN_S" "Ray's head at $address (log $JOB_DIR/ray-$NODE_NAME.log)" \
    head_or_end "$NODE_ADDRESS" "$port" || exit 1
  printf '%s %s\n' "$NODE_ADDRESS" "$port" > "$JOB_DIR/head.partial"
  mv "$JOB_DIR/head.partial" "$JOB_DIR/head"
  await "$SLIMX_JOIN_S" "$NODES nodes in Ray at $address" joined_or_asked "$address" || {
    log "$(ray_nodes "$address" || true) have come; the others say why in their ray-*.log in $JOB_DIR"
    finish 1
  }
  heed
  log "$NODES nodes in Ray at $address"
  starting=1
  # Quoted for YAML, to which the brackets of IPv6 are a list.
  setsid slimx train "$@" "cluster.ray_address='$address'" &
  driver_pid=$!
  [[ -z $asked ]] || tell_driver "$asked" # it came between these lines
  until gone "$driver_pid"; do
    heed
    sleep 0.5 || true
  done
  collect "$driver_pid" || status=$?
  driver_pid=''
  # Whoever starts a run again after it has lost a part must know whether it got any further.
  ((status != LOST)) || slimx status "$@" --saved > "$JOB_DIR/saved" || true
  finish "$status"
}

joined_or_asked() {
  ! gone "$ray_pid" || finish_without_ray
  [[ -e $JOB_DIR/asked ]] || has_nodes "$1" "$NODES"
}

finish_without_ray() {
  log "Ray ended on this node: $(tail -n 3 "$JOB_DIR/ray-$NODE_NAME.log")"
  finish 1
}

# Do what is asked in the job's directory.
heed() {
  local name
  [[ -e $JOB_DIR/asked ]] || return 0
  read -r name < "$JOB_DIR/asked"
  rm "$JOB_DIR/asked"
  log "asked for SIG$name"
  tell_driver "$name"
}

# finish STATUS: tell the other nodes, and end.
finish() {
  echo "$1" > "$JOB_DIR/over.partial"
  mv "$JOB_DIR/over.partial" "$JOB_DIR/over"
  rm -f "$JOB_DIR/token"
  exit "$1"
}

head_or_end() {
  ! gone "$ray_pid" || finish_without_ray
  port_open "$@"
}

be_worker() {
  local host port
  trap : USR1 # the driver's node knows what to do about it
  trap 'exit 143' TERM INT
  await "$SLIMX_JOIN_S" "the first node to write $JOB_DIR/head" test -e "$JOB_DIR/head" || exit 1
  read -r host port < "$JOB_DIR/head"
  spare_proxy "$host,$NODE_ADDRESS"
  await "$SLIMX_JOIN_S" "Ray at $host port $port" port_open "$host" "$port" || exit 1
  start_ray --address="$(in_url "$host"):$port"
  while [[ ! -e $JOB_DIR/over ]]; do
    ! gone "$ray_pid" || die "Ray ended on this node: $(tail -n 3 "$JOB_DIR/ray-$NODE_NAME.log")"
    sleep 1 || true
  done
}

main "$@"
