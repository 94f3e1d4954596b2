#!/usr/bin/env bash
# Switches node $1 on from the outer namespaces: private namespaces, and a cable into the switch.
set -u
number=$1
unshare --net --mount --uts --pid --ipc --fork --kill-child=SIGKILL --mount-proc --propagation private \
    "$HERE/node.sh" "$number" </dev/null >>"$FOLDER/node$number.boot.log" 2>&1 &
above=$!
first=
until [[ $first && $(readlink "/proc/$first/ns/net") != "$(readlink /proc/self/ns/net)" ]]; do
    kill -0 $above 2>/dev/null || exit 1
    sleep 0.01
    read -r first _ <"/proc/$above/task/$above/children"
done
echo "$first" >"$FOLDER/node$number.pid" # as the outer namespaces count
ip link delete "cable$number" 2>/dev/null
ip link add "cable$number" type veth peer name eth0 netns "$first"
ip link set "cable$number" master switch up
