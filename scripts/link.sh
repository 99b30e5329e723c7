#!/usr/bin/env bash
# Runs a command as two ranks of two hosts: network namespaces of this machine, joined by a link of the given rate. It
# measures what a network between hosts does, in place of the machine's loopback. Needs Linux, root and iproute2.
#   scripts/link.sh 10gbit python scripts/migration.py --precision fp32
# Rank 0's output and exit status are shown; rank 1's output only if it fails.
set -uo pipefail
if (($# < 2)); then
    echo "link.sh: usage: scripts/link.sh RATE COMMAND..., such as 10gbit" >&2
    exit 2
fi
rate="$1"
shift
hosts=("dynmo$$a" "dynmo$$b")
output="$(mktemp)" || exit 1
end() {
    trap "" TERM INT HUP
    # shellcheck disable=SC2046  # one word for each rank
    kill $(jobs -p) 2>/dev/null
    for host in "${hosts[@]}"; do ip netns del "$host" 2>/dev/null; done
    rm -f "$output"
}
trap end EXIT
trap "exit 143" TERM INT HUP # else bash may end without it

make_link() {
    local number host
    for host in "${hosts[@]}"; do
        ip netns add "$host" && ip -n "$host" link set lo up || return 1
    done
    ip -n "${hosts[0]}" link add eth0 type veth peer name eth0 netns "${hosts[1]}" || return 1
    for number in 0 1; do
        host="${hosts[$number]}"
        ip -n "$host" addr add "10.77.0.$((number + 1))/24" dev eth0 && ip -n "$host" link set eth0 up || return 1
        ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 20ms || return 1
    done
}
make_link || { echo "link.sh: the machine does not permit it" >&2; exit 1; }

export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
RANK=0 ip netns exec "${hosts[0]}" "$@" &
first=$!
RANK=1 ip netns exec "${hosts[1]}" "$@" >"$output" 2>&1 &
second=$!
wait "$first" # and not in the foreground: a signal ends the script, and the ranks with it
code=$?
wait "$second" || { cat "$output" >&2; code=1; }
exit "$code"
