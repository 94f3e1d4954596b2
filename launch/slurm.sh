# What every slurm/*.sbatch does, once it has said how much it wants: `run LAUNCHER-ARGUMENTS…` in an allocation.
#
#   1. One task on each node starts Ray there; the first node's waits for all and runs the launcher, once
#      (skyrl_mega/cluster/slurm_node.py). They talk through a folder, runs/slurm/<job>-<start>/, where their logs are too.
#   2. SIGUSR1 (#SBATCH --signal=B:USR1@600, or scancel --signal=USR1 --batch JOB): the launcher writes a checkpoint and
#      exits with 75. The job is queued again, and goes on from there.
#   3. A node that does not answer, or whose Ray has ended, but not all of them: the job is queued again, without it.
#   4. Any other end is the job's: 0 done, 2 the input is wrong, 1 a fault.
#
# Nothing here is to be edited. Partition, account, time and nodes are sbatch's arguments or its variables
# (SBATCH_PARTITION, SBATCH_ACCOUNT, …); settings of the run are arguments after the script's name; the rest is:
#
#   SKYRL_MEGA_HOME         this repository, seen by every node (the directory that sbatch was called in)
#   SKYRL_MEGA_VENV         the environment: a folder (.venv-cuda where the job has GPUs, else .venv); no container
#   SKYRL_MEGA_PYTHON       an interpreter with the environment (bin/python of SKYRL_MEGA_VENV; python3 in a container)
#   SKYRL_MEGA_CONTAINER    an image: *.sif runs with apptainer, anything else with enroot through pyxis
#   SKYRL_MEGA_MOUNTS       SOURCE:TARGET[,…] more that the container sees
#   SKYRL_MEGA_SRUN         more arguments of the srun that starts the tasks
#   SKYRL_MEGA_INTERFACE    network interface that Ray, gloo and NCCL use to meet
#   SKYRL_MEGA_RAY_OPTIONS  more arguments of `ray start`, such as --object-store-memory=…
#   SKYRL_MEGA_START_S      seconds for all nodes to be there (600)
#   SKYRL_MEGA_REQUEUES     how often the job may be queued again because of failed nodes (5)
#   SKYRL_MEGA_SECRETS      file of NAME=VALUE lines for the environment of the tasks; only its owner may read it
#   SKYRL_MEGA_CACHE        folder of compiled code on each node's own disk (/tmp/skyrl-cache-<uid>)
#   SKYRL_MEGA_RETRIEVER_ON where the retrieval service of the run is (launch/slurm_retriever.sh)
#   SKYRL_MEGA_COMMAND      launch, or preflight

set -u -o pipefail
source "$(dirname "${BASH_SOURCE[0]}")/slurm_retriever.sh" || exit 2

say() { printf '%s %s\n' "$(date +%T)" "$*"; }

run() {
    cd "${SKYRL_MEGA_HOME:-$SLURM_SUBMIT_DIR}" || exit 2
    local job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} nodes=$SLURM_JOB_NUM_NODES code=0 ended='' failed=''
    local folder=$PWD/runs/slurm/$job-$start service='' watcher='' cpus
    cpus=${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE%%[(,]*}} # the first is for batch scripts, the second for salloc
    read_secrets || exit 2
    rm -rf "$folder" && mkdir -p "$folder" || exit 2
    say "job $job, start $start, on $SLURM_JOB_NODELIST; its folder: $folder"

    SKYRL_MEGA_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sort | paste -sd,)
    export SKYRL_MEGA_NODES
    # The cluster's token lives in this job's environment, which no other user can read.
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
    [[ ${SKYRL_MEGA_INTERFACE:-} ]] && export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$SKYRL_MEGA_INTERFACE}

    local python flags=() inside=()
    choose_python || exit 2

    trap 'touch "$folder/stop"; say "asked to end"' USR1
    trap 'ended=1' TERM # scancel or the time limit: the tasks have it too, and end by themselves
    start_service "$@" || exit $?
    if [[ $service ]]; then
        # The run reads the address from its environment: other users see command lines.
        set -- "$@" 'environment.retriever.url=${oc.env:SKYRL_MEGA_RETRIEVER}' \
            environment.retriever.token_variable=SKYRL_MEGA_RETRIEVER_TOKEN
    fi
    # shellcheck disable=SC2086  # SKYRL_MEGA_SRUN is several words
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cpus" --cpu-bind=none \
        --mem=0 --mpi=none --export=ALL --wait=60 --kill-on-bad-exit=0 "${flags[@]}" ${SKYRL_MEGA_SRUN:-} \
        "${inside[@]}" "$python" -m skyrl_mega.cluster.slurm_node "$folder" "$@" &
    local tasks=$!
    while kill -0 $tasks 2>/dev/null; do wait $tasks && code=0 || code=$?; done
    end_service
    if [[ -s $folder/code ]]; then
        code=$(<"$folder/code")
    elif ((code == 0)); then
        say "the tasks ended, and none of them has written $folder/code"
        code=1
    fi

    if [[ $ended ]]; then
        say "ended from outside"
        exit 143
    elif ((code == 75)) && [[ -e $folder/lost ]] && ((start >= ${SKYRL_MEGA_REQUEUES:-5})); then
        say "exit 1: the retrieval service was lost in $((start + 1)) starts of the job (SKYRL_MEGA_REQUEUES)"
        exit 1
    elif ((code == 75)); then
        say "exit 75: a checkpoint is there, the same job goes on from it"
        requeue
    elif ((code != 0 && code != 2)); then
        failed=$(failed_nodes "$folder")
        if [[ $failed && $failed != "$SKYRL_MEGA_NODES" ]] && ((start < ${SKYRL_MEGA_REQUEUES:-5})); then
            say "exit $code: $failed failed, the job goes on without"
            requeue "$failed"
        fi
    fi
    say "exit $code"
    exit "$code"
}

# Sets `python`, and the words around it for a container: `flags` of srun, `inside` before the command.
choose_python() {
    local mounts=$PWD:$PWD${SKYRL_MEGA_MOUNTS:+,$SKYRL_MEGA_MOUNTS}
    python=${SKYRL_MEGA_PYTHON:-}
    case ${SKYRL_MEGA_CONTAINER:-} in
        '') python=${python:-$(environment)} || return ;;
        *.sif) inside=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$SKYRL_MEGA_CONTAINER") ;;
        *) flags=(--container-image="$SKYRL_MEGA_CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
    python=${python:-python3}
}

# Exports the lines NAME=VALUE of $SKYRL_MEGA_SECRETS. Values reach the tasks in the environment, never in a command line.
read_secrets() {
    local file=${SKYRL_MEGA_SECRETS:-} line name number=0
    [[ $file ]] || return 0
    if [[ -d $file ]]; then
        say "error: SKYRL_MEGA_SECRETS=$file: it is a folder; allowed is a file of lines NAME=VALUE" >&2
        return 2
    fi
    if [[ ! -r $file || $(stat -Lc %a "$file") != *00 ]]; then
        say "error: SKYRL_MEGA_SECRETS=$file: allowed is a file that only you may read: chmod 600 $file" >&2
        return 2
    fi
    while IFS= read -r line || [[ $line ]]; do
        number=$((number + 1)) line=${line%$'\r'}
        [[ ! $line || $line == '#'* ]] && continue
        name=${line%%=*}
        if [[ $line != *=* || ! $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            # The number alone: a line without a name may be the secret itself.
            say "error: SKYRL_MEGA_SECRETS=$file, line $number: allowed are lines NAME=VALUE" >&2
            return 2
        fi
        export "$name=${line#*=}"
    done <"$file"
}

# The interpreter of the environment in the repository: with GPUs that of `make cuda`, as torch for CPUs sees none.
environment() {
    local venv=${SKYRL_MEGA_VENV:-} gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}
    if [[ ! $venv && $gpus != 0 ]]; then
        venv=.venv-cuda
        if [[ ! -x $venv/bin/python ]]; then
            say "error: $PWD/$venv is not there, and this job has $gpus GPUs on a node: \`make cuda\` makes it;" \
                "or give SKYRL_MEGA_VENV, SKYRL_MEGA_PYTHON or SKYRL_MEGA_CONTAINER" >&2
            return 2
        fi
    fi
    venv=${venv:-.venv}
    if [[ ! -x $venv/bin/python ]]; then
        say "error: $venv/bin/python is not there: \`make\` makes .venv, \`make cuda\` .venv-cuda; or give" \
            "SKYRL_MEGA_VENV, SKYRL_MEGA_PYTHON or SKYRL_MEGA_CONTAINER" >&2
        return 2
    fi
    realpath --no-symlinks "$venv/bin/python"
}

# Nodes of the allocation that say so themselves, or cannot run a command within 30 s; separated by commas.
failed_nodes() {
    local node
    for node in ${SKYRL_MEGA_NODES//,/ }; do
        { [[ -e $1/failed/$node ]] || ! timeout 30 srun --overlap --mem=0 -N1 -n1 -w "$node" true; } \
            >/dev/null 2>&1 && echo "$node" &
    done | sort | paste -sd,
}

# Queues the job again, without the nodes $1. Slurm then ends this script, after a while: the rest of it still runs.
requeue() {
    local without job=$SLURM_JOB_ID
    # A task of an array is queued again by this name: one task's number alone may be the whole array's.
    [[ ${SLURM_ARRAY_JOB_ID:-} ]] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    without=$(scontrol --oneliner show job "$job" | sed -n '1s/.* ExcNodeList=\([^ ]*\).*/\1/p')
    [[ $without == '(null)' ]] && without=
    trap '' TERM
    scontrol requeue "$job" || return
    [[ ${1:-} ]] && scontrol update JobId="$job" ExcNodeList="${without:+$without,}$1"
}
