#!/usr/bin/env bash
# Process 1 of the outer namespaces: the network's switch, munge and Slurm's controller. Its end ends all the rest.
# From cluster.py: FOLDER, NODES, GPUS, SHARED.
set -u
cd "$FOLDER"
hostname controller
ip link set lo up
ip link add switch type bridge
ip addr add 10.77.0.254/24 dev switch
ip link set switch up

mkdir -p /run/munge /etc/slurm
mount -t tmpfs -o mode=755 tmpfs /run/munge
mount --bind "$FOLDER/etc" /etc/slurm
mount --bind "$FOLDER/etc/hosts" /etc/hosts
mount --bind "$FOLDER/etc/resolv.conf" /etc/resolv.conf
munged --force --key-file="$FOLDER/etc/munge.key" --pid-file=/run/munge/munged.pid --log-file="$FOLDER/munge.log" \
    --seed-file="$FOLDER/munge.seed"
slurmctld
for number in $(seq "$NODES"); do
    "$HERE/node_on.sh" "$number"
done
while :; do
    sleep 3600 &
    wait $!
done
