#!/usr/bin/env bash
# Start Ray on some hosts, run a command on this one, the first of them, and end what was started together with it.
#
#   HOSTS="node0 node1 …" examples/nemotron_ultra/launch_ray.sh COMMAND [ARGUMENT ...]
#
# The hosts have the same folders as this one, and it reaches them by ssh. Where RAY_ADDRESS is set there is a cluster already, and
# nothing but the command is run. The exit status is the command's.
#
#   PORT        of Ray's head (6379)
#   HEAD_IP     this host's address as the others see it
#   RAY_START   further options of every `ray start`
#   REMOTE      what runs a command on a host, given the host and the command (ssh)
#   READY_S     how long nodes may take to come, in seconds (300)
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "error: no command: HOSTS=\"node0 node1\" $0 python -m examples.grpo.train CONFIG ray=auto" >&2
    exit 2
fi
if [[ -n ${RAY_ADDRESS:-} ]]; then
    exec "$@"
fi

read -ra hosts <<<"${HOSTS:-$(hostname)}"
read -ra start <<<"${RAY_START:-}"
port=${PORT:-6379}
remote=${REMOTE:-ssh}
head_ip=${HEAD_IP:-$(python -c 'import ray; print(ray.util.get_node_ip_address())')}
pids=()
driver=

# An engine's own children end with its Ray worker, even when that is killed: raylets read it when they start.
export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=true
export RAY_USAGE_STATS_ENABLED=0
# Who reaches a cluster without a token runs code on it. A `ray start` takes the token of ~/.ray, a driver only when it is told.
if [[ -z ${RAY_AUTH_MODE:-} ]] && ray get-auth-token --generate >/dev/null 2>&1; then
    export RAY_AUTH_MODE=token
fi

# ssh brings none of the environment along. What may be a secret is left out: a command line shows to every user of a host.
settings() {
    local name
    for name in $(compgen -e | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|(ULTRA_PATCHES|VLLM|NCCL|HF|RAY|CUDA|TORCH)_?.*)$' |
        grep -vE 'TOKEN$|KEY|SECRET|PASSWORD|_VISIBLE_DEVICES|^RAY_ADDRESS$'); do
        printf '%s=%q ' "$name" "${!name}"
    done
}

pid_file() {
    printf '%q' "/tmp/ray-$(id -un)-$port-$1.pid"
}

# Wait for so many nodes, or for the first `ray start` that ends.
ready() {
    python -m examples.nemotron_ultra.cluster_ready "$head_ip:$port" "$1" --timeout "${READY_S:-300}" &
    driver=$!
    if ! wait -n "$driver" "${pids[@]}"; then
        echo "error: Ray did not come up on all of ${hosts[*]}: the reason is above" >&2
        exit 1
    fi
    driver=
}

stop() {
    local status=$? host
    trap - EXIT INT TERM
    [[ -z $driver ]] || kill "$driver" 2>/dev/null || true
    for host in "${hosts[@]:1}"; do
        "$remote" "$host" "kill \$(cat $(pid_file "$host") 2>/dev/null) 2>/dev/null; rm -f $(pid_file "$host")" </dev/null || true
    done
    [[ ${#pids[@]} -eq 0 ]] || kill "${pids[@]}" 2>/dev/null || true
    wait
    exit "$status"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ray start --head --block --node-ip-address="$head_ip" --port="$port" --include-dashboard=false "${start[@]}" >&2 &
pids+=("$!")
ready 1
for host in "${hosts[@]:1}"; do
    begin="cd $(printf '%q' "$PWD") && echo \$\$ >$(pid_file "$host")"
    "$remote" "$host" "$begin && exec env $(settings)ray start --block --address=$head_ip:$port$(printf ' %q' "${start[@]}")" </dev/null >&2 &
    pids+=("$!")
done
ready "${#hosts[@]}"

RAY_ADDRESS=$head_ip:$port "$@" &
driver=$!
wait "$driver"
