# shellcheck shell=bash
# What the sbatch templates share: run_job, which checks the nodes, runs node.sh on them, and brings the job back after a
# preemption, after the loss of a part, or without bad nodes. Sourced by a template in the root of the repository.
#
# SLIMX_JOBS         where every start of a job has a directory of its own, on a file system that all nodes see [runs/jobs]
# SLIMX_SRUN         more arguments of srun, such as --container-image=... --container-mounts=... []
# SLIMX_HEALTH       arguments of `slimx health` on every node; `none`: nodes are not checked [--gpus $SLIMX_GPUS]
# SLIMX_HEALTH_S     seconds for the check of all nodes [300]
# SLIMX_RESTARTS     times that a job may come back in all [100]
# SLIMX_RETRIES      times that a run that lost a part may come back without having saved a further step since [2]
# SLIMX_RESUBMITS    times that a job may be submitted again without bad nodes [3]
#
# Exit status: that of slimx train; 0 too for a job that goes on as another one. A job that comes back is
# requeued: Slurm ends this script then.
source scripts/launch/common.sh
: "${SLIMX_JOBS:=runs/jobs}" "${SLIMX_SRUN:=}" "${SLIMX_HEALTH:=--gpus $SLIMX_GPUS}" "${SLIMX_HEALTH_S:=300}"
: "${SLIMX_RESTARTS:=100}" "${SLIMX_RETRIES:=2}" "${SLIMX_RESUBMITS:=3}" "${SLIMX_RESUBMITTED:=0}"

run_job() {
  local status=0 asked=''
  local -a more
  read -ra more <<< "$SLIMX_SRUN"
  export SLIMX_GPUS SLIMX_NVLINK SLIMX_VENV SLIMX_NODE_SETUP SLIMX_INTERFACE SLIMX_IP SLIMX_JOIN_S SLIMX_STOP_S
  JOB_DIR=$(realpath -m "$SLIMX_JOBS")/$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}
  export JOB_DIR
  mkdir -p "$JOB_DIR/health"
  log "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST: $JOB_DIR"
  trap 'pass_on USR1' USR1
  trap 'pass_on TERM' TERM
  healthy "$@"
  [[ $asked != USR1 ]] || requeue "asked to leave"
  [[ $asked != TERM ]] || exit 143
  # One task per node; each knows by SLURM_PROCID which one it is.
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 "${more[@]}" \
    scripts/launch/node.sh "$@" &
  collect "$!" || status=$?
  # The driver's own status, where it came to one: srun's is the highest of all nodes.
  [[ ! -e $JOB_DIR/over ]] || status=$(< "$JOB_DIR/over")
  case $status in
    0) log "done" ;;
    75 | 138) requeue "saved" ;; # or stopped before there was anything to save
    143) log "stopped" ;;
    "$LOST")
      log "lost a part; looking at the nodes"
      rm -f "$JOB_DIR"/health/*
      healthy "$@"
      ! may_retry || requeue "step $(saved_by "$JOB_DIR") is saved"
      ;;
    *)
      log "ended with status $status; looking at the nodes"
      rm -f "$JOB_DIR"/health/*
      healthy "$@"
      ;;
  esac
  exit "$status"
}

# A signal to this script goes to node.sh by a file: srun would send it to every process of every node.
pass_on() {
  asked=$1
  echo "$1" > "$JOB_DIR/asked.partial"
  mv "$JOB_DIR/asked.partial" "$JOB_DIR/asked"
}

# Check every node; if one is not fit for the run, submit the job again without it and end this one.
healthy() {
  [[ $SLIMX_HEALTH != none ]] || return 0
  local node
  local -a arguments more bad=()
  read -ra arguments <<< "$SLIMX_HEALTH"
  read -ra more <<< "$SLIMX_SRUN"
  timeout "$SLIMX_HEALTH_S" srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 "${more[@]}" \
    scripts/launch/check_node.sh "${arguments[@]}" --clock "$(date +%s)" || true
  while read -r node; do
    # A node that does not answer in time has no such line.
    if ! grep -qsx 'fit' "$JOB_DIR/health/$node"; then
      bad+=("$node")
      log "$node is not fit: $(grep -s . "$JOB_DIR/health/$node" || echo "it did not answer in $SLIMX_HEALTH_S s")"
    fi
  done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ((${#bad[@]} == 0)) || resubmit "$(IFS=, && echo "${bad[*]}")" "$@"
}

# resubmit BAD ARGUMENT...: the same job again, without the nodes BAD and those that it already was without.
resubmit() {
  local without=$1 job excluded option
  local -a options=()
  shift
  ((SLIMX_RESUBMITTED < SLIMX_RESUBMITS)) ||
    die "submitted again $SLIMX_RESUBMITTED times because of bad nodes, SLIMX_RESUBMITS allows no more"
  job=$(scontrol show job -o "$SLURM_JOB_ID")
  excluded=$(job_field ExcNodeList)
  [[ -z $excluded ]] || without=$without,$excluded
  scontrol write batch_script "$SLURM_JOB_ID" "$JOB_DIR/script" > /dev/null
  # What may have been said on sbatch's command line; the rest stands in the script.
  for option in partition=Partition account=Account qos=QOS time=TimeLimit job-name=JobName nodes=NumNodes \
    reservation=Reservation output=StdOut; do
    if [[ -n $(job_field "${option#*=}") ]]; then options+=("--${option%%=*}=$(job_field "${option#*=}")"); fi
  done
  unset SLURM_RESTART_COUNT # of this job, not of the next
  SLIMX_RESUBMITTED=$((SLIMX_RESUBMITTED + 1)) sbatch --parsable --exclude="$without" "${options[@]}" --export=ALL \
    "$JOB_DIR/script" "$@" > "$JOB_DIR/resubmitted"
  log "submitted again as job $(< "$JOB_DIR/resubmitted"), without $without"
  exit 0
}

# job_field NAME: of the line that `scontrol show job -o` wrote into `job`; nothing for what is not set.
job_field() {
  sed -nE "s/.* $1=([^ ]*).*/\1/p" <<< "$job" | grep -vx -e '(null)' -e 'N/A' -e '' || true
}

# The step of the newest checkpoint when the start with the directory $1 had ended; 0 where that is not known.
saved_by() { cat "$1/saved" 2> /dev/null || echo 0; }

# Whether a run that lost a part may come back: too many starts in a row have not if none of them saved a further step.
may_retry() {
  local saved start in_vain=0
  saved=$(saved_by "$JOB_DIR")
  for ((start = ${SLURM_RESTART_COUNT:-0} - 1; start >= 0; start--)); do
    [[ -e ${JOB_DIR%/*}/$start/saved && $(saved_by "${JOB_DIR%/*}/$start") -ge $saved ]] || break
    in_vain=$((in_vain + 1))
  done
  ((in_vain < SLIMX_RETRIES)) || {
    log "came back $in_vain times without a checkpoint after step $saved, SLIMX_RETRIES allows no more"
    return 1
  }
}

# Slurm puts the job back into the queue and ends this script; the run continues from its newest checkpoint.
requeue() { # WHY
  ((${SLURM_RESTART_COUNT:-0} < SLIMX_RESTARTS)) ||
    die "started again ${SLURM_RESTART_COUNT} times, SLIMX_RESTARTS allows no more"
  log "$1; back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # the end comes meanwhile
  die "Slurm took the job back but did not end it in 60 s"
}
