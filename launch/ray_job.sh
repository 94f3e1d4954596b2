#!/usr/bin/env bash
# The launcher as a job of a Ray cluster that runs already:  launch/ray_job.sh --config FILE [group.key=value …]
#
#   RAY_API_SERVER_ADDRESS  the cluster's job server, http://HEAD:8265
#   RAY_AUTH_TOKEN          the cluster's token; or RAY_AUTH_TOKEN_PATH, a file with it
#   SKYRL_MEGA_DIRECTORY    a folder that all nodes see: relative paths of models, data and runs begin there
#   SKYRL_MEGA_PYTHON       the interpreter on the cluster (python)
#   SKYRL_MEGA_SHIP         names of variables that go along, separated by spaces; the dashboard shows their values
#   SKYRL_MEGA_JOB          the job's name (one of Ray's making)
#
# This repository goes along as the job's working directory, without what .gitignore names. Exit code: 0 done, 1 not;
# the job's log says why. The same command goes on from the newest checkpoint. docs/ray.md has the manual.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${RAY_API_SERVER_ADDRESS:?the address of the job server, http://HEAD:8265}"
: "${SKYRL_MEGA_DIRECTORY:?a folder that all nodes see}"
if [[ ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    export RAY_AUTH_MODE=token
fi
ray=ray
[[ -x .venv/bin/ray ]] && ray=.venv/bin/ray

for name in ${SKYRL_MEGA_SHIP:-}; do
    : "${!name?SKYRL_MEGA_SHIP names it}"
done
shipped=$(python3 -c 'import json, os, sys; print(json.dumps({"env_vars": {n: os.environ[n] for n in sys.argv[1:]}}))' \
    ${SKYRL_MEGA_SHIP:-})
exec "$ray" job submit ${SKYRL_MEGA_JOB:+--submission-id="$SKYRL_MEGA_JOB"} --working-dir=. \
    --runtime-env-json="$shipped" \
    -- "${SKYRL_MEGA_PYTHON:-python}" -m skyrl_mega.launch --directory "$SKYRL_MEGA_DIRECTORY" "$@"
