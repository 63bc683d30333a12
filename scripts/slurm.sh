#!/usr/bin/env bash
# Usage: slurm.sh COMMAND [ARGUMENTS]
# Runs a command beside a Slurm of this machine alone, which is there as long as the command is:
# `srun` and `sbatch` in it talk to that one. Exit code 75 where there can be none. Needs root, and
# Debian's packages slurm-wlm and munge.
set -euo pipefail
# Those of a job that this is a part of.
for name in $(compgen -e SLURM_ || true); do unset "$name"; done
none() { echo "no Slurm here: $1" >&2; exit 75; }
[ "$(id -u)" = 0 ] || none "its daemons need root"
for program in munged slurmctld slurmd srun; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || none "$program is missing"
done
export PATH="$PATH:/usr/sbin"
folder=$(mktemp -d)
name=$(hostname -s)
started=()
end() {
    # A step that has ended tells both daemons so before it goes.
    for _ in $(seq 50); do
        [ ${#started[@]} = 3 ] && pgrep -P "${started[2]}" -r R,S,D >/dev/null || break
        sleep 0.1
    done
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 50); do
        kill -0 "${started[@]}" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "${started[@]}" 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT

chmod 755 "$folder"
mkdir -m 755 "$folder/munge"
(umask 077; head -c 1024 /dev/urandom >"$folder/munge/key")
munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --log-file="$folder/munge/log" --pid-file="$folder/munge/pid" --seed-file="$folder/munge/seed" \
    >/dev/null 2>&1 &
started+=($!)
cat >"$folder/slurm.conf" <<END
ClusterName=here
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=$name NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$name Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
END
mkdir "$folder/state" "$folder/spool"
export SLURM_CONF="$folder/slurm.conf"
slurmctld -D -f "$SLURM_CONF" >"$folder/slurmctld.log" 2>&1 &
started+=($!)
slurmd -D -f "$SLURM_CONF" -N "$name" >"$folder/slurmd.log" 2>&1 &
started+=($!)
is_up() { timeout 2 sinfo -h -o %t 2>/dev/null | grep -qx idle; }
until is_up; do
    alive=0
    for pid in "${started[@]}"; do kill -0 "$pid" 2>/dev/null && alive=$((alive + 1)); done
    [ "$alive" = 3 ] && [ "$SECONDS" -lt 30 ] || { tail -n 5 "$folder"/*.log >&2; none "its daemons do not start"; }
    sleep 0.2
done
"$@"
