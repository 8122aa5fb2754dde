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
#   REMOTE      what runs a command on a host, given the host and the command, and passes its own input on to it (ssh)
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

# ssh brings none of the environment along. What is named like a secret is left out, as from Ray's runtime environments.
settings() {
    local name
    for name in $(compgen -e | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|(ULTRA_PATCHES|VLLM|NCCL|HF|RAY|CUDA|TORCH)_?.*)$'); do
        case $name in
        *TOKEN_PATH) ;;
        *TOKEN | *TOKEN_* | *KEY* | *SECRET* | *PASSW* | *CREDENTIAL* | *_VISIBLE_DEVICES | RAY_ADDRESS) continue ;;
        esac
        printf 'export %s=%q\n' "$name" "${!name}"
    done
}

# What the shell of another host reads: it starts a node, and ends it when this input ends, or the node does. It is an input, for
# a command line shows to every user of a host, and values hold secrets under any name. No file there could be another user's.
node() {
    printf 'cd %q || exit\n' "$PWD"
    settings
    printf 'node=(ray start --block --address=%q' "$head_ip:$port"
    [[ ${#start[@]} -eq 0 ]] || printf ' %q' "${start[@]}"
    cat <<'END'
)
{
    "${node[@]}" </dev/null &
    ray=$!
    trap 'kill "$ray" 2>/dev/null' TERM HUP
    { while read -r _; do :; done; kill "$ray"; } <&0 2>/dev/null &
    while true; do
        wait "$ray"
        status=$?
        kill -0 "$ray" 2>/dev/null || break
    done
    kill "$!" 2>/dev/null
    exit "$status"
}
END
    exec tail -s 0.2 --pid="$life" -f /dev/null
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
    local status=$? tries
    trap - EXIT INT TERM
    [[ -z $driver ]] || kill "$driver" 2>/dev/null || true
    kill "$life" 2>/dev/null || true
    for ((tries = 80; tries > 0; tries--)); do
        if [[ ${#pids[@]} -lt 2 ]] || ! kill -0 "${pids[@]:1}" 2>/dev/null; then break; fi
        sleep 0.5
    done
    [[ ${#pids[@]} -eq 0 ]] || kill "${pids[@]}" 2>/dev/null || true
    wait
    exit "$status"
}
# It ends with this script, even with a killed one, and the inputs of the other hosts' shells with it.
tail -s 0.2 --pid=$$ -f /dev/null &
life=$!
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ray start --head --block --node-ip-address="$head_ip" --port="$port" --include-dashboard=false "${start[@]}" >&2 &
pids+=("$!")
ready 1
for host in "${hosts[@]:1}"; do
    "$remote" "$host" "bash -s" < <(node) >&2 &
    pids+=("$!")
done
ready "${#hosts[@]}"

RAY_ADDRESS=$head_ip:$port "$@" &
driver=$!
wait "$driver"
