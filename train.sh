#!/bin/sh
# Train in the background: the run survives logout, restarts after failures, and can give a rented machine back.
#
#   ./train.sh                                    # gpt2-124m on every GPU of this machine, into log/gpt2-124m
#   ./train.sh speedrun-124m --out-dir log/fast   # any arguments of train_gpt2.py
#   ./train.sh model_19073.pt 2                   # continue that checkpoint's run until 2 epochs are done
#   ./train.sh stop log/gpt2-124m                 # save and stop the run of that folder
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 BUDGET_USD=30 GPU_HOUR_USD=2.5 ./train.sh
#
# The same command starts a run and resumes it, from the newest checkpoint of its run folder. There, train-<time>.log
# has every decision, train.log is a link to the newest log, and status.json says how the trainer ended.
#
# Settings are environment variables:
#
#   NPROC          number of processes; by default one per GPU, or one without GPUs
#   MAX_RESTARTS   restarts after failures, 3 by default, or after two hours without a word; an error that you must fix
#                  is never restarted
#
#   GPU_HOUR_USD   the price of one GPU for an hour
#   BUDGET_USD     save and stop training once the GPUs of this start have cost so much; needs GPU_HOUR_USD
#
#   PUSH_TO        OWNER/NAME: push the best checkpoint to this private repository of the Hub at the end, and the newest
#                  with its optimizer state, so that it can be trained further elsewhere. Your token is tried before the
#                  start. A push that fails is tried again for an hour, which BUDGET_USD does not cover.
#   PUSH_EVERY     push while it trains, too, every so many seconds
#
#   REMOVE_POD     1: remove this machine at the end, if the weights are pushed, if PERSISTENT=1, or if there are none.
#                  If they cannot be pushed, STOP_CMD stops it. After a mistake of yours in the first ten minutes it
#                  stays. `kill` prevents it, in the minute that the log announces.
#   PERSISTENT     1: the run folder outlives this machine, as on a network volume
#   SHUTDOWN_CMD   the command that removes this machine; by default, on RunPod: runpodctl pod delete $RUNPOD_POD_ID
#   STOP_CMD       the command that stops it and keeps its disk; by default, on RunPod, with the run folder below
#                  /workspace: runpodctl pod stop $RUNPOD_POD_ID

case ${1:-} in
    -h | --help) exec sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
esac

# The project's Python or, where it was installed otherwise, that of the shell.
here=$(dirname "$(readlink -f "$0")")
python=$here/.venv/bin/python
[ -x "$python" ] || python=$(command -v python || command -v python3) || {
    echo "error: no python on PATH; run: make install" >&2
    exit 1
}

# -P: no file of the current folder is taken for a module.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m cloud.supervisor "$@"
