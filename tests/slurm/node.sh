#!/usr/bin/env bash
# Process 1 of a node: its address, a private /tmp and /dev/shm, device files without GPUs, slurmd.
set -u
number=$1
name=node$number
hostname "$name"
ip link set lo up
until ip link show eth0 &>/dev/null; do sleep 0.01; done
ip addr add "10.77.0.$number/24" dev eth0
ip link set eth0 up
ip route add default via 10.77.0.254

# Shared paths below /tmp stay shared.
mkdir -p "$FOLDER/$name" "$FOLDER/$name.tmp"
mount -t tmpfs -o mode=1777 tmpfs "$FOLDER/$name.tmp"
IFS=:
for path in $SHARED; do
    if [[ $path == /tmp/* ]]; then
        mkdir -p "$FOLDER/$name.tmp/${path#/tmp/}"
        mount --rbind "$path" "$FOLDER/$name.tmp/${path#/tmp/}"
    fi
done
unset IFS

dev=/run/munge/$name.dev
mkdir -p "$dev"
mount -t tmpfs -o mode=755 tmpfs "$dev"
for file in null zero full random urandom tty; do
    : >"$dev/$file"
    mount --bind "/dev/$file" "$dev/$file"
done
mkdir "$dev/shm" "$dev/pts"
mount --rbind /dev/pts "$dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$dev/shm"
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
for gpu in $(seq 0 $((GPUS - 1))); do
    mknod -m 666 "$dev/nvidia$gpu" c 195 "$gpu" # as the driver's; opening one fails
done
mount --rbind "$dev" /dev
mount --move "$FOLDER/$name.tmp" /tmp
cd /
slurmd -N "$name"
while :; do
    sleep 3600 &
    wait $!
done
