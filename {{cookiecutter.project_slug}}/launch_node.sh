#!/usr/bin/env bash
# Trains on this machine; or, started on each of several machines, on all of them together.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ./launch_node.sh [OPTIONS] [-- MAIN_OPTIONS]

Without options: trains on all GPUs of this machine, or with one process where there is none.
On several machines, run it on each, with the same options but for --node-rank.

  --nnodes N            how many machines                                  NNODES          1
  --node-rank R         which one this is, from 0                          NODE_RANK       0
  --nproc-per-node P    processes here: one for each GPU                   NPROC_PER_NODE  all GPUs, else 1
  --master-addr HOST    address of the machine with --node-rank 0          MASTER_ADDR
  --master-port PORT    a free port of it                                  MASTER_PORT     29500
  --max-restarts N      start again up to N times when a process was lost  MAX_RESTARTS    0; 3 on several machines
  --check               train nothing: show all machines side by side, and how fast they talk to each other
  -h, --help            this text; python main.py --help lists MAIN_OPTIONS

The names in capitals are variables that say the same. PYTHON chooses the interpreter; START_GRACE says how many seconds the
machines wait for each other (300). Ctrl-C, SIGTERM or SIGUSR1: all save, and leave with 75; a second one: at once.

  ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3
  ./launch_node.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- --epochs 90      on 10.0.0.1
  ./launch_node.sh --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -- --epochs 90      on the other
TEXT
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

whole() { # NAME VALUE LEAST
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then refuse "$1: '$2' is not a whole number from $3; see --help"; fi
}

nnodes=${NNODES:-1} node_rank=${NODE_RANK:-0} nproc=${NPROC_PER_NODE:-}
master_addr=${MASTER_ADDR:-} master_port=${MASTER_PORT:-29500} max_restarts=${MAX_RESTARTS:-} check=0
while (($#)); do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --check) check=1 && shift && continue ;;
    --) shift && break ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  (($# > 1)) || refuse "$1: needs a value, or is no option; options of main.py go behind --; see --help"
  case $1 in
    --nnodes) nnodes=$2 ;;
    --node-rank | --node_rank) node_rank=$2 ;;
    --nproc-per-node | --nproc_per_node | --nproc) nproc=$2 ;;
    --master-addr | --master_addr) master_addr=$2 ;;
    --master-port | --master_port) master_port=$2 ;;
    --max-restarts | --max_restarts) max_restarts=$2 ;;
    *) refuse "$1: no such option; options of main.py go behind --; see --help" ;;
  esac
  shift 2
done

# Whatever folder it is started from, and whatever name the project's folder has.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x $here/.venv/bin/python ]]; then
  python=$here/.venv/bin/python
fi

[[ " $*" != *" --nproc"[\ =]* ]] || refuse "--nproc: the launcher starts the processes; use --nproc-per-node, before the --"
# Check everything that can be checked before torch is loaded: a typing error costs a moment, not a minute.
"$python" "$here/config.py" "$@"
if [[ -z $nproc ]]; then
  nproc=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c ^GPU || true)
  [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] && nproc=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
  ((nproc > 0)) || nproc=1
fi
whole --nnodes "$nnodes" 1
whole --node-rank "$node_rank" 0
whole --nproc-per-node "$nproc" 1
whole --master-port "$master_port" 1
((10#$master_port < 65536)) || refuse "--master-port $master_port: ports run from 1 to 65535"
[[ -n $max_restarts ]] || max_restarts=$((10#$nnodes > 1 ? 3 : 0))
((check == 0)) || max_restarts=0
whole --max-restarts "$max_restarts" 0
nnodes=$((10#$nnodes)) node_rank=$((10#$node_rank)) nproc=$((10#$nproc)) # 08 is no octal number
((node_rank < nnodes)) || refuse "--node-rank $node_rank: with --nnodes $nnodes, ranks run from 0 to $((nnodes - 1))"
((nnodes == 1)) || [[ -n $master_addr ]] || refuse "--master-addr: needed with --nnodes $nnodes; see --help"

# Other launchers' settings would silently apply to torchrun.
for name in "${!PET_@}" RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do unset "$name"; done
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}

# The node's part of the run: ddp/launcher/node.py. Its modules are found here, not in the folder that this was started from.
start='import sys; sys.path[0] = sys.argv.pop(1); from ddp.launcher.node import main; main()'
exec "$python" -c "$start" "$here" --nnodes="$nnodes" --node-rank="$node_rank" --nproc="$nproc" \
  --master-addr="$master_addr" --master-port="$((10#$master_port))" --max-restarts="$((10#$max_restarts))" --check="$check" -- "$@"
