#!/usr/bin/env bash
# Trains on this machine. Run it on each of several machines to train on all of them together. --help lists the options.
if [ -z "${BASH_VERSION:-}" ]; then
  echo "error: this script needs bash: type ./launch_node.sh ... or bash launch_node.sh ..." >&2
  exit 2
fi
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")") # also through a link to this script
# PYTHON, or the active environment, or the project's own, or python3.
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x $here/.venv/bin/python ]]; then
  python=$here/.venv/bin/python
fi

# Python finds the modules in this folder, not in the one where the command was typed.
start='import sys; sys.path[0] = sys.argv.pop(1)'
start+='; from config import Config; from ddp.launcher.launch_node import main; main(Config)'
exec "$python" -c "$start" "$here" "$@"
