#!/usr/bin/env bash
# Starts launch_node.sh on every host of a list, over ssh, and stops all of them when one fails.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/ssh.sh HOSTFILE [OPTIONS] [-- MAIN_OPTIONS]

Runs launch_node.sh on every host of HOSTFILE. Type it on any machine that can ssh to each of them without a password;
that may be one of them. The project lies in the same folder on all. HOSTFILE has a line a host; the first is node 0:

  gpu1 slots=8        # slots: processes there, the same on every line; without it, one for each GPU
  me@gpu2 slots=8

  --nproc-per-node P    processes on each host         NPROC_PER_NODE  one for each GPU, else 1
  --master-addr HOST    address of the first host      MASTER_ADDR     what ssh takes its name for
  --master-port PORT    a free port of it              MASTER_PORT     29500
  --max-restarts N      when a process was lost        MAX_RESTARTS    3
  --check               train nothing: show all hosts side by side, and how fast they talk to each other
  --remote-dir DIR      the project's folder there     as here
  -h, --help            this text; python main.py --help lists MAIN_OPTIONS

The names in capitals are variables that say the same. Relative paths in MAIN_OPTIONS start at the project's folder there.
These variables are passed on: NCCL_*, GLOO_*, TORCH_*, OMP_NUM_THREADS, START_GRACE, and PYTHON, which is that of your
active environment if it is not set. Ports and keys stand in ~/.ssh/config; ssh is also given SSH_OPTIONS, as '-F FILE'.

Each line of output begins with its host. Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP: all save, and leave with 75; a second one:
at once. When one host fails, the others are stopped, and its exit code is returned; 3 if a host cannot be reached.

  launch/ssh.sh hosts
  launch/ssh.sh hosts --nproc-per-node 4 -- --dataset synthetic --epochs 90
TEXT
}

for word; do
  case $word in
    -h | --help) usage && exit 0 ;;
    --) break ;;
  esac
done

# Whatever folder it is started from; the path as it was typed, since links may lead elsewhere on the hosts.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x $here/.venv/bin/python ]]; then
  python=$here/.venv/bin/python
fi
start='import sys; sys.path[0] = sys.argv[1]; from ddp.launcher.ssh import main; main()'
exec "$python" -c "$start" "$here" "$@"
