# shellcheck shell=bash
# What all launch scripts share; sourced, never run. Every wait here has a deadline and says what it waited for.
#
# SLIMX_VENV         the environment of slimx [.venv]
# SLIMX_NODE_SETUP   a file of the site that every node sources first: modules, paths, SLIMX_ADDRESS []
# SLIMX_GPUS         GPUs of each node that the run may use; 0 on a machine without [8]
# SLIMX_INTERFACE    network interface of Ray, gloo and NCCL's bootstrap [the one with the node's first address]
# SLIMX_ADDRESS      this node's address, to be set by SLIMX_NODE_SETUP where it cannot be guessed []
# SLIMX_IP           4 or 6: which kind of address is taken where a node has both [4]
# SLIMX_NVLINK       1: the nodes share an NVLink domain, as in a GB300 NVL72 rack [0]
# SLIMX_DOMAIN       name of the NVLink domain, to be set by SLIMX_NODE_SETUP where nvidia-smi does not tell []
# SLIMX_JOIN_S       seconds until all nodes must have joined Ray [300]
# SLIMX_STOP_S       seconds in which Ray must end on a node [60]

set -euo pipefail

: "${SLIMX_VENV:=.venv}" "${SLIMX_NODE_SETUP:=}" "${SLIMX_GPUS:=8}" "${SLIMX_INTERFACE:=}" "${SLIMX_ADDRESS:=}"
: "${SLIMX_IP:=4}" "${SLIMX_NVLINK:=0}" "${SLIMX_DOMAIN:=}" "${SLIMX_JOIN_S:=300}" "${SLIMX_STOP_S:=60}"

# Exit status of a run that lost a part, and goes on from its newest checkpoint when it is started again.
# shellcheck disable=SC2034 # of those who source this
LOST=69

log() { printf '%s %s: %s\n' "$(date +%H:%M:%S)" "${NODE_NAME:-$(hostname)}" "$*" >&2; }

die() {
  log "$*"
  exit 1
}

# await SECONDS WHAT COMMAND...: repeat COMMAND until it succeeds.
await() {
  local seconds=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@"; do
    ((SECONDS < end)) || {
      log "waited $seconds s for $what"
      return 1
    }
    sleep 0.5 || true # a signal to the whole process group ends it
  done
}

# The environment that site and NCCL need, the same for every process that is started from here.
prepare_environment() {
  if [[ -n $SLIMX_NODE_SETUP ]]; then
    # shellcheck source=/dev/null
    source "$SLIMX_NODE_SETUP"
  fi
  export PATH="$PWD/$SLIMX_VENV/bin:$PATH" PYTHONUNBUFFERED=1
  [[ $SLIMX_VENV != /* ]] || export PATH="$SLIMX_VENV/bin:$PATH"
  NODE_ADDRESS=${SLIMX_ADDRESS:-$(own_address)}
  [[ -n $NODE_ADDRESS ]] || die "no IPv$SLIMX_IP address of this node is found; set SLIMX_ADDRESS or SLIMX_INTERFACE"
  if [[ -n $SLIMX_INTERFACE ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$SLIMX_INTERFACE}"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$SLIMX_INTERFACE}"
  fi
  # NCCL finds HCAs and GIDs by itself; a site with HCAs for storage names the others: NCCL_IB_HCA=mlx5_0,mlx5_1 in
  # SLIMX_NODE_SETUP, and NCCL_IB_GID_INDEX where RoCE needs it.
  if [[ $SLIMX_IP == 6 ]]; then
    export NCCL_SOCKET_FAMILY="${NCCL_SOCKET_FAMILY:-AF_INET6}" NCCL_IB_ADDR_FAMILY="${NCCL_IB_ADDR_FAMILY:-AF_INET6}"
  fi
  if [[ $SLIMX_NVLINK == 1 ]]; then
    # NVLink between nodes needs memory that CUDA can hand from node to node (cuMem with fabric handles).
    export NCCL_MNNVL_ENABLE="${NCCL_MNNVL_ENABLE:-1}" NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:-1}"
    SLIMX_DOMAIN=${SLIMX_DOMAIN:-$(own_domain)}
  fi
}

# This node's address: of SLIMX_INTERFACE, else the first that is neither loopback nor link-local.
own_address() {
  local wanted='.'
  [[ $SLIMX_IP == 6 ]] && wanted=':'
  {
    if [[ -n $SLIMX_INTERFACE ]]; then
      ip -o "-$SLIMX_IP" addr show dev "$SLIMX_INTERFACE" scope global | awk '{sub("/.*", "", $4); print $4}'
    else
      hostname -I | tr ' ' '\n'
    fi
  } | grep -F -- "$wanted" | grep -v -e '^127\.' -e '^fe80:' | head -n 1 || true
}

# The NVLink domain and partition of this node's first GPU; nothing where there is none.
own_domain() {
  nvidia-smi -q -i 0 2> /dev/null |
    awk -F ' *: *' '/CliqueId/ {clique = $2} /ClusterUUID/ {uuid = $2} END {if (uuid ~ /[1-9a-f]/) print uuid "." clique}' ||
    true
}

# An address as URLs and Ray spell it: IPv6 in brackets.
in_url() {
  if [[ $1 == *:* ]]; then printf '[%s]' "$1"; else printf '%s' "$1"; fi
}

# Ray's HTTP and gRPC clients would send even these addresses through a site's proxy.
spare_proxy() { export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost,::1,$1" && export NO_PROXY="$no_proxy"; }

# shellcheck disable=SC2016 # the inner bash expands them
port_open() { timeout 2 bash -c 'exec 3<> "/dev/tcp/$1/$2"' bash "$1" "$2" 2> /dev/null; }

# free_ports ADDRESS COUNT
free_ports() {
  python -c 'import sys; from slimx.runtime.ports import free_port; print(*(free_port(sys.argv[1]) for _ in range(int(sys.argv[2]))))' "$@"
}

# A secret of this job that only its user can read: whoever has it may run code on all nodes.
make_token() { (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > "$1"); }

# ray_arguments RANK: what every Ray node is started with.
ray_arguments() {
  local memory
  # Shards of a batch are a few MB, and weights do not travel through the object store.
  memory=$(awk '/^MemTotal/ {bytes = $2 * 1024 * 0.02; print int(bytes > 268435456 ? bytes : 268435456)}' /proc/meminfo)
  printf '%s\n' --node-ip-address="$NODE_ADDRESS" --num-gpus="$SLIMX_GPUS" --object-store-memory="$memory" \
    --labels="slimx-order=$(printf %05d "$1")${SLIMX_DOMAIN:+,slimx-domain=$SLIMX_DOMAIN}" \
    --min-worker-port=0 --max-worker-port=0 --disable-usage-stats --log-color=false --block
  [[ -z ${SLIMX_CPUS:-${SLURM_CPUS_ON_NODE:-}} ]] || printf '%s\n' --num-cpus="${SLIMX_CPUS:-$SLURM_CPUS_ON_NODE}"
}

# The number of nodes that `ray status` shows as active.
ray_nodes() {
  timeout 30 ray status --address="$1" 2> /dev/null |
    awk '/^Active:/ {on = 1; next} /^[A-Z]/ {on = 0} on && /node_/ {count += $1} END {print count + 0}'
}

has_nodes() { [[ $(ray_nodes "$1" || true) -ge $2 ]]; }

# end PID SECONDS: SIGTERM, then SIGKILL. A process that has ended already is no error.
end() {
  kill -TERM "$1" 2> /dev/null || return 0
  await "$2" "the end of process $1" gone "$1" || kill -KILL "$1" 2> /dev/null || true
}

# A child that ended stays a zombie until it is waited for.
gone() {
  local state
  state=$(awk '/^State:/ {print $2}' "/proc/$1/status" 2> /dev/null) || return 0
  [[ -z $state || $state == Z ]]
}

# collect PID: its exit status, through all signals that a trap here answers.
collect() {
  local status
  while true; do
    status=0
    wait "$1" || status=$?
    # A trapped signal ends `wait` with a status above 128 too, while the process goes on.
    if ((status <= 128)) || gone "$1"; then break; fi
  done
  ((status <= 128)) || { status=0 && wait "$1" || status=$?; }
  return "$status"
}
