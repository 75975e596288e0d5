#!/bin/bash
# fleet.sh CHECKOUT ENVIRONMENT NAME=ADDRESS...
# Makes machines on one bridge, prints "ready", and then waits: a line on standard input names a machine that loses its
# power at once, and the end of standard input ends them all. Init of namespaces of its own (tests/cluster/fleet.py):
# machines exist there and in memory, so that nothing of them can be left.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
checkout=$1 environment=$2
shift 2

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/sshd /run/home /run/fleet
ssh-keygen -q -t ed25519 -N '' -C fleet -f /run/fleet/key
echo '127.0.0.1 localhost' > /run/fleet/hosts

ip link set lo up
ip link add bridge type bridge
ip addr add 10.77.0.1/24 dev bridge
ip link set bridge up
for machine in "$@"; do
    name=${machine%=*} address=${machine#*=}
    echo "$address $name" >> /run/fleet/hosts
    ip netns add "$name"
    ip link add "to-$name" type veth peer name eth0 netns "$name"
    ip link set "to-$name" master bridge up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "$address/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 10.77.0.1 # by which Ray finds the machine's address
done
mount --bind /run/fleet/hosts /etc/hosts

for machine in "$@"; do
    name=${machine%=*}
    ip netns exec "$name" unshare --mount --pid --uts --ipc --fork --kill-child --mount-proc \
        bash "$here/machine.sh" "$name" "$checkout" "$environment" < /dev/null > "/run/fleet/$name.log" 2>&1 &
    echo $! > "/run/fleet/$name.pid"
    disown # or its end would be announced
done
for machine in "$@"; do
    for _ in {1..100}; do
        (exec 3<> "/dev/tcp/${machine#*=}/22") 2> /dev/null && continue 2
        sleep 0.1
    done
    cat "/run/fleet/${machine%=*}.log" >&2
    exit 1
done
echo ready

while read -r name; do
    ip link delete "to-$name" # first, or its kernel would tell the others goodbye
    kill -KILL "$(< "/run/fleet/$name.pid")"
    echo "$name is off"
done
