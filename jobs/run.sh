#!/usr/bin/env bash
# What a scheduler runs: jobs/run.sh JOB.toml [options of `batchinfer run`].
#
# A job that a signal or --deadline stopped leaves with 75 (EX_TEMPFAIL): let the scheduler queue it again, and the same
# command carries on. A job that was killed from outside (out of memory, a lost machine) is started again here, as
# finished rows are safe, BATCHINFER_RETRIES times (3), after BATCHINFER_RETRY_SECONDS (30). Every other exit code,
# such as that of a faulty option, is passed through at once.
set -uo pipefail

if [ $# -eq 0 ]; then
    echo "usage: jobs/run.sh JOB.toml [options of batchinfer run]" >&2
    exit 2
fi

retries=${BATCHINFER_RETRIES:-3}
pause=${BATCHINFER_RETRY_SECONDS:-30}
child=
stopping=

# Bash runs a trap only once its foreground command ends: so the job runs in the background, and the signal is handed on.
stop() {
    stopping=1
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

for ((attempt = 0; ; attempt++)); do
    batchinfer run --job "$@" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a trapped signal ends `wait` before the job has ended
        wait "$child"
        code=$?
    done
    child=
    if [ "$code" -le 128 ]; then
        exit "$code"
    fi
    if [ -n "$stopping" ]; then
        exit 75
    fi
    if [ "$attempt" -ge "$retries" ]; then
        exit "$code"
    fi
    echo "jobs/run.sh: killed by signal $((code - 128)); starting again in $pause s" >&2
    sleep "$pause" &
    wait $!
    [ -z "$stopping" ] || exit 75
done
