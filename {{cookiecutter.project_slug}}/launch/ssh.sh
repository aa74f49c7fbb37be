#!/usr/bin/env bash
# usage: launch/ssh.sh HOSTFILE [OPTIONS] [-- MAIN_OPTIONS]
# Runs ./launch_node.sh OPTIONS -- MAIN_OPTIONS on all hosts of HOSTFILE; `ssh HOST` must need no password. Each line is
# HOST, or HOST slots=N for N processes there, the same on every line (default: one per GPU). The first host is node 0.
# The project is in the same directory on all hosts, or in REMOTE_DIR. The hosts receive NCCL_*, GLOO_*, TORCH_*,
# OMP_NUM_THREADS, PYTHON (default: that of your active environment), and the variables in ./launch_node.sh --help.
# MASTER_ADDR is by default the address that ssh uses for the first host. ssh receives SSH_OPTIONS, such as '-F FILE'.
# Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP: all hosts save, and exit with 75. A second signal: all exit at once. When one host
# fails, the others are stopped, and its exit code is returned: 3 if ssh cannot reach it, 8 if the connection is lost.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # sh is another shell, or bash with other rules
set -euo pipefail
refuse() { echo "error: $1" >&2 && exit 2; }

on_host() { # DIRECTORY ARGUMENTS. Runs on each host. A line on its input, or the end of it, is a request to stop
  echo started
  cd -- "$1" && [[ -f launch_node.sh ]] || { echo "error: no launch_node.sh in $1: set REMOTE_DIR" >&2 && exit 3; }
  bash launch_node.sh "${@:2}" </dev/null &
  launcher=$!
  { read -r; kill "$launcher"; read -r && kill "$launcher" && sleep 5 && kill -9 "$launcher"; } <&0 >/dev/null 2>&1 &
  wait "$launcher"
  code=$?
  kill "$!"
  exit "$((code == 143 ? 75 : code == 127 ? 3 : code))" # 143: launch_node.sh had no handler yet. 127: no PYTHON
}

print_lines() { # HOST. Lines do not mix: a process prints while it holds the only line in the pipe `turn`
  while IFS= read -r line || [[ -n $line ]]; do
    read -r -u "$turn"
    printf '%s | %s\n' "$1" "$line" || true # the run continues if its output has no reader
    echo >&"$turn"
  done 2>/dev/null
}

run_host() { # HOST. Runs the program on the input there, and writes HOST and its exit code into the pipe `exits`
  trap '' INT TERM USR1 HUP                # only the script itself handles them
  for fd in $inputs; do exec {fd}>&-; done # so that the input of every host ends with the script
  { "${ssh[@]}" -- "$1" exec bash 2>&1 >&9 | print_lines "${1#*@}" >&2; } 9>&1 |
    { read -r || exit 3; print_lines "${1#*@}"; } || code=$?
  echo "$1 $((code > 128 ? 8 : code))" >&"$exits"
}

stop_hosts() { # CODE. All hosts save the first time; they exit at once the second time, and this script with CODE
  ((SECONDS > stopped_at + 1)) || return 0 # one request may arrive twice
  ((stopped_at < 0)) || result=$1 deadline=$((SECONDS + 10)) # no $(...): `read -t` below would end it in the middle
  stopped_at=$SECONDS
  for fd in $inputs; do echo >&"$fd" || true; done 2>/dev/null
}

[[ ! " $* " =~ " "(-h|--help)" " ]] || { sed -n '2,/^[^#]/s/^# //p' -- "$0" && exit; }
options=" $* " hosts=() inputs='' code=0 result=0 stopped_at=-9 deadline=1000000000
while read -r host slot rest || [[ -n $host ]]; do
  [[ "$host $slot$rest" =~ ^[^=-][^=]*\ (slots=[1-9][0-9]*)?$ ]] || refuse "$1: not HOST or HOST slots=N: $host $slot"
  [[ -z ${hosts:-} || $slot == "$slots" ]] || refuse "$1: all hosts need the same slots=N: $host $slot"
  hosts+=("$host") slots=$slot nnodes=${#hosts[@]}
done < <(sed $'s/[#\r].*//; /^[[:space:]]*$/d' -- "${1:-}" 2>/dev/null)
[[ -n ${hosts:-} ]] || refuse "${1:-HOSTFILE}: no such file, or no host in it: write one line per host; see --help"
[[ ! ${options%% -- *} =~ --(nnodes|node[-_]rank) ]] || refuse "--nnodes and --node-rank follow from the lines of $1"

read -r -a ssh <<<"ssh ${SSH_OPTIONS:-} -oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=99 -oControlPath=none"
export MASTER_ADDR=${MASTER_ADDR:-$("${ssh[@]}" -TG -- "${hosts[0]}" | sed -n 's/^hostname //p')}
[[ $nnodes == 1 || ! $MASTER_ADDR =~ ^(localhost$|127\.|::1$) ]] || refuse "$1: other hosts cannot reach $MASTER_ADDR"
dir=${REMOTE_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)} active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
export PYTHON=${PYTHON:-${active:+$active/bin/python}}
program=$(declare -f on_host && declare -p "${!NCCL_@}" "${!GLOO_@}" "${!TORCH_@}" "${!MASTER_@}" \
  OMP_NUM_THREADS PYTHON NPROC_PER_NODE MAX_RESTARTS START_GRACE 2>/dev/null) || true # some are not set
trap '' PIPE # a host may end at any time
exec {exits}<> <(:) {turn}<> <(echo) # pipes, open for reading and writing
for rank in "${!hosts[@]}"; do
  exec {fd}> >(run_host "${hosts[rank]}")
  inputs+=" $fd"
  call=$(printf '%q ' on_host "$dir" --nnodes="$nnodes" --node-rank="$rank" ${slots:+"${slots/slots/--nproc}"} "${@:2}")
  echo "$program"$'\n'"$call" >&"$fd" || true
done
for name in INT TERM USR1 HUP; do trap 'stop_hosts '"$((128 + $(kill -l "$name")))" "$name"; done
for _ in "${hosts[@]}"; do
  until read -r -t 1 -u "$exits" host code; do ((SECONDS < deadline)) || exit "$result"; done
  ((code == 0 || (result != 0 && result != 75))) || result=$code
  ((code == 0 || stopped_at >= 0)) || { stop_hosts 0; echo "error: $host: exit code $code; all hosts stop" >&2 || :; }
done
((result == 0)) || exit "$result"
