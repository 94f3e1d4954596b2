# The retrieval service of a run on Slurm; launch/slurm.sh reads this file. SKYRL_MEGA_RETRIEVER_ON says where it runs:
#
#   component   the second component of a heterogeneous job: the default of a job that has one
#   step        a step on the first node of the job
#   NUMBER      the job of slurm/retriever.sbatch
#
# The service writes its address and its token to a file that only this user may read; the run has both from its
# environment. If the service is lost, the run writes a checkpoint and the job is queued again.

# Starts the service if the job has one and waits for its address; sets `service` and `watcher`. Other variables are
# those of `run`.
start_service() {
    local on=${SKYRL_MEGA_RETRIEVER_ON:-} address=$folder/retriever pid='' where=() content
    local state='' absent=0 failed=0 # of the service's job
    [[ ! $on && ${SLURM_HET_SIZE:-1} -gt 1 ]] && on=component
    case $on in
        '') return 0 ;;
        component) where=(--het-group=1 --cpus-per-task="${SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1%%(*}") ;;
        # No GPU: all memory of the node's GPUs is the run's.
        step) where=(--overlap --gres=none -w "${SKYRL_MEGA_NODES%%,*}" --cpus-per-task="$cpus") ;;
        *[!0-9]*)
            say "error: SKYRL_MEGA_RETRIEVER_ON=$on: allowed are component, step, and the number of a job" >&2
            return 2
            ;;
        *) address=$PWD/runs/slurm/retriever-$on/address ;;
    esac
    if [[ ${where[*]} ]]; then
        serve "$address" "$@" &
        pid=$!
    fi
    say "retrieval service ($on): waiting until it answers"
    while :; do
        if [[ ! $pid ]]; then look_for_job || return; fi
        # A requeued job leaves its old address behind until it runs again.
        [[ -s $address && ($pid || $state == RUNNING) ]] && break
        sleep $((pid ? 1 : 10))
        [[ $ended ]] && exit 143
        if [[ $pid ]] && ! kill -0 "$pid" 2>/dev/null; then
            wait "$pid"
            code=$?
            say "exit $code: the retrieval service ended before it answered; $folder/retriever.log may say why"
            return "$((code ? code : 1))"
        fi
    done
    content=$(<"$address")
    { read -r SKYRL_MEGA_RETRIEVER && read -r SKYRL_MEGA_RETRIEVER_TOKEN; } <<<"$content"
    export SKYRL_MEGA_RETRIEVER SKYRL_MEGA_RETRIEVER_TOKEN
    say "retrieval service ($on): ready"
    watch_service "$address" "$content" "$pid" &
    service=${pid:-job} watcher=$!
}

# Sets `state` to that of the service's job $on. The controller may fail to answer: 30 looks, 5 minutes, pass without.
look_for_job() {
    local answer
    state=''
    if answer=$(squeue -h -j "$on" -o %T 2>"$folder/squeue.log"); then
        failed=0 state=$answer
        [[ $state ]] && absent=0 || absent=$((absent + 1))
    elif grep -qi 'invalid job id' "$folder/squeue.log"; then
        absent=$((absent + 1)) # a job that ended some minutes ago
    else
        failed=$((failed + 1))
    fi
    if ((absent >= 3)); then
        say "error: SKYRL_MEGA_RETRIEVER_ON=$on: that job is not in the queue" >&2
        return 2
    elif ((failed >= 30)); then
        say "error: SKYRL_MEGA_RETRIEVER_ON=$on: no answer of squeue: $(tail -n 1 "$folder/squeue.log")" >&2
        return 1
    fi
}

# Runs the service of the settings in the arguments as a step: `serve ADDRESS-FILE LAUNCHER-ARGUMENTS…`.
serve() {
    local address=$1
    shift
    exec srun "${where[@]}" --nodes=1 --ntasks=1 --cpu-bind=none --mem=0 --mpi=none \
        --export=ALL "${flags[@]}" "${inside[@]}" "$python" -m skyrl_mega.retriever run --address-file "$address" \
        --logs "$folder" "$@"
}

# slurm/retriever.sbatch: the service as a job of its own, until `scancel`. At the time limit the job is queued again.
retriever() {
    cd "${SKYRL_MEGA_HOME:-$SLURM_SUBMIT_DIR}" || exit 2
    local folder=$PWD/runs/slurm/retriever-$SLURM_JOB_ID code=0 python flags=() inside=() where=()
    read_secrets && choose_python || exit 2
    rm -rf "$folder" && mkdir -p "$folder" || exit 2
    where=(--cpus-per-task="$SLURM_CPUS_ON_NODE")
    say "retrieval service, job $SLURM_JOB_ID, on $SLURM_JOB_NODELIST; its folder: $folder"
    trap requeue USR1
    trap : TERM
    serve "$folder/address" "$@" &
    while kill -0 $! 2>/dev/null; do wait $! && code=0 || code=$?; done
    say "exit $code"
    exit "$code"
}

# Asks the run to end with a checkpoint once the service is gone or has another address.
watch_service() {
    local failed=0
    while ((failed < 3)); do # three looks: a shared file system may fail to answer one
        sleep 3
        if [[ $(cat "$1" 2>/dev/null) == "$2" ]] && { [[ ! $3 ]] || kill -0 "$3" 2>/dev/null; }; then
            failed=0
        else
            failed=$((failed + 1))
        fi
    done
    say "the retrieval service is lost: the run writes a checkpoint"
    touch "$folder/lost" "$folder/stop" # last: the end of the run ends this watch
}

end_service() {
    [[ $watcher ]] && kill "$watcher" 2>/dev/null
    [[ $service && $service != job ]] || return 0
    rm -f "$folder/retriever" # the service ends without its file; a signal to srun would have Slurm kill it
    for _ in {1..20}; do
        kill -0 "$service" 2>/dev/null || break
        sleep 1
    done
    kill "$service" 2>/dev/null
    wait "$service"
}
