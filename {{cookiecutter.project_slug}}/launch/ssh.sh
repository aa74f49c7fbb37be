#!/usr/bin/env bash
# Runs launch_node.sh on every host of a list, over ssh, and stops all of them when one fails. --help lists the options.
if [ -z "${BASH_VERSION:-}" ]; then
  echo "error: this script needs bash: type ./launch/ssh.sh ... or bash launch/ssh.sh ..." >&2
  exit 2
fi
set -euo pipefail

# What each host runs. Its input is the connection: a line is a signal to pass on, its end means that this side is gone.
run_on_host() { # FOLDER ARGUMENTS
  refuse() { echo "launch/ssh.sh: $1" && exit 3; }
  { cd -- "$1" && [[ -f launch_node.sh ]]; } 2>/dev/null || refuse "no launch_node.sh in $1; see --remote-dir"
  [[ -z ${PYTHON:-} ]] || command -v "$PYTHON" >/dev/null || refuse "no $PYTHON there; set PYTHON to one of all hosts"
  echo "launch/ssh.sh: ready"
  read -r word && [[ $word == go ]] || exit 75
  bash launch_node.sh "${@:2}" </dev/null &
  launcher=$!
  {
    while read -r name; do asked=1 && kill -s "$name" "$launcher"; done
    [[ ${asked:-} ]] || kill "$launcher"
  } <&0 >/dev/null 2>&1 &
  reader=$!
  wait "$launcher"
  code=$?
  kill "$reader" 2>/dev/null
  exit "$code"
}

# The script itself, if this is a link to it. `readlink -f` is not portable.
file=${BASH_SOURCE[0]}
while [[ -L $file ]]; do
  link=$(readlink -- "$file")
  [[ $link == /* ]] || link=$(dirname -- "$file")/$link
  file=$(cd -P -- "$(dirname -- "$link")" && pwd)/${link##*/}
done
# The path as it was typed: links to folders may lead to another place on the hosts.
here=$(cd -- "$(dirname -- "$file")/.." && pwd)
# PYTHON, or the active environment, or the project's own, or python3.
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x $here/.venv/bin/python ]]; then
  python=$here/.venv/bin/python
fi

start='import sys; project = sys.path[0] = sys.argv.pop(1); program = sys.argv.pop(1)'
start+='; from config import Config; from ddp.launcher.ssh import main; main(Config, project, program)'
exec "$python" -c "$start" "$here" "$(declare -f run_on_host)" "$@"
