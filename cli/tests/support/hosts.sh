#!/usr/bin/env bash
# Four hosts on one machine: network namespaces with an address each, joined by a bridge. To be run in
# namespaces of users, mounts and networks (unshare -Urmn):
#
#   hosts.sh              only makes them, to see whether that can be
#   hosts.sh each CMD     and runs CMD on each, with what a launcher says in its environment
#   hosts.sh cyclic CMD   and runs CMD twice on each of the first two, dealt out one by one
#   hosts.sh mpirun CMD   and has Open MPI run it, from the first host, by a daemon on each other one
#
# With SLOW=3 RATE=2mbit what host 3 sends leaves it at that rate. With FLAP=3 the link of host 3 is down
# for two seconds, once m.csv has some rows; how many it has then and after that is in the file flapped.
# With CUT=1 it stays down.
# With NETEM, the program of netem.c, and
# FAULTS='loss=5 late=10', it stands between the hosts in place of the bridge. TCP sends again after
# 20 ms there, not 200, for tests to be quick.
set -eu
how=${1:-nothing}
[ "$#" = 0 ] || shift
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
if [ -n "${NETEM:-}" ]; then
    # shellcheck disable=SC2086 # Faults are words.
    "$NETEM" 4 $FAULTS &
    netem=$!
    until ip link show t3 >/run/t3 2>&1; do
        kill -0 "$netem" || exit 77
        sleep 0.02
    done
else
    ip link add br0 type bridge
    ip addr add 10.9.0.254/24 dev br0
    ip link set br0 up
fi
for i in 0 1 2 3; do
    ip netns add h$i
    if [ -n "${NETEM:-}" ]; then
        ip link set t$i netns h$i name e0
    else
        ip link add v$i type veth peer name e0 netns h$i
        ip link set v$i master br0
        ip link set v$i up
    fi
    ip -n h$i addr add 10.9.0.$((i + 1))/24 dev e0
    ip -n h$i link set e0 up
    ip -n h$i link set lo up
    [ -z "${NETEM:-}" ] || ip -n h$i route change 10.9.0.0/24 dev e0 rto_min 20ms
done
if [ -n "${SLOW:-}" ]; then
    tc -n "h$SLOW" qdisc add dev e0 root tbf rate "$RATE" burst 5kb latency 2s
fi
case $how in
nothing) ;;
each)
    pids=
    for i in 0 1 2 3; do
        RANK=$i WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 \
            ip netns exec h$i unshare -u sh -c "hostname host$i && exec \"\$@\"" sh "$@" &
        pids="$pids $!"
    done
    if [ -n "${FLAP:-}" ]; then
        (
            rows() { cat m.csv 2>/dev/null | wc -l; }
            while [ "$(rows)" -lt 5 ]; do sleep 0.02; done
            ip -n "h$FLAP" link set e0 down
            rows >flapped
            sleep 2
            rows >>flapped
            [ -n "${CUT:-}" ] || ip -n "h$FLAP" link set e0 up
        ) &
    fi
    code=0
    for pid in $pids; do wait "$pid" || code=$?; done
    if [ -n "${NETEM:-}" ]; then
        kill "$netem"
        wait "$netem" || code=$?
    fi
    exit $code
    ;;
cyclic)
    pids=
    for i in 0 1 2 3; do
        host=$((i % 2))
        # Where LOCAL is empty, nobody says which of its host's processes one is.
        RANK=$i WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 LOCAL_RANK=${LOCAL:+$((i / 2))} MASTER_ADDR=10.9.0.1 \
            MASTER_PORT=29500 ip netns exec h$host \
            unshare -u sh -c "hostname host$host && exec \"\$@\"" sh "$@" &
        pids="$pids $!"
    done
    code=0
    for pid in $pids; do wait "$pid" || code=$?; done
    exit $code
    ;;
mpirun)
    cp /etc/hosts /run/hosts
    for i in 0 1 2 3; do echo "10.9.0.$((i + 1)) host$i" >>/run/hosts; done
    mount --bind /run/hosts /etc/hosts
    # In place of ssh: a shell on that host.
    cat >/run/on_host <<'SHELL'
#!/bin/sh
host=$1
shift
exec ip netns exec "h${host#host}" unshare -u sh -c "hostname $host; $*"
SHELL
    chmod +x /run/on_host
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    network=10.9.0.0/24
    code=0
    # Itself on the first host, as where somebody has logged in there.
    ip netns exec h0 unshare -u sh -c 'hostname host0 && exec "$@"' sh \
        mpirun --mca plm rsh --mca plm_rsh_agent /run/on_host --mca plm_rsh_no_tree_spawn 1 \
        --mca oob_tcp_if_include $network --mca btl tcp,self --mca btl_tcp_if_include $network \
        -np 4 -host host0,host1,host2,host3 "$@" || code=$?
    [ -z "${NETEM:-}" ] || kill "$netem" || true
    exit $code
    ;;
esac
