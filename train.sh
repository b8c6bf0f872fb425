#!/usr/bin/env bash
# Train in the background. The run survives logout and restarts after failures; at the end it can be pushed to the Hub,
# and the machine can be given back.
#
#   ./train.sh                                  # gpt2-124m on every GPU of this machine, into log/gpt2-124m
#   ./train.sh speedrun-124m --out-dir log/fast # any arguments of train_gpt2.py
#   ./train.sh model_19072.pt 2                 # resume that checkpoint's run and train until 2 epochs are done
#   ./train.sh stop log/gpt2-124m               # save and stop the run of that folder
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 BUDGET_USD=30 GPU_HOUR_USD=2.5 ./train.sh
#
# A run folder (OUT) that holds checkpoints is resumed, never started over. OUT/train-<time>.log records every decision
# of one start, OUT/train.log is a link to the newest of these logs, and OUT/status.json records how the trainer ended.
# Environment variables:
#   NPROC         number of processes. Default: one per GPU, or one on a machine without GPUs.
#   START_WAIT    seconds for which the log is shown after the start. Default: 15.
#   MAX_RESTARTS  how often to restart after a failure. Default: 3. An error that you must fix is not restarted.
#   RESTART_DELAY seconds between a failure and the restart. Default: 10.
#   BUDGET_USD    save and stop training once this start has cost that much; needs GPU_HOUR_USD.
#   GPU_HOUR_USD  the price of one GPU for an hour.
#   PUSH_TO       OWNER/NAME: at the end, push the checkpoint to this Hub repository (hub.py push-model) and wait for
#                 it. A run that is not finished (budget, time limit, failure) is pushed with its optimizer state, so
#                 that it can be resumed elsewhere. Whether your token may write there is checked before the start. A
#                 token that expires is renewed by `hf auth login` on this machine: the next try reads it.
#   PUSH          which checkpoints to push at the end: newest (default), best (the lowest val loss) or all.
#   PUSH_OPTIMIZER  1: push a finished run with its optimizer state, too, which a second epoch needs elsewhere.
#   PUSH_PUBLIC   1: the repository is public, or is created public. Default: private.
#   PUSH_EVERY    with PUSH_TO: also push new checkpoints, with optimizer state, every so many seconds. If the machine
#                 is taken away, only the work of that time and of --save-every steps is lost. The Hub keeps the newest
#                 of these. Default: 0, never.
#   PUSH_RETRY_HOURS  for how many hours the last push is retried if it fails, with growing pauses. BUDGET_USD does not
#                 cover that time. Default: 0.25 if the machine can then be removed or stopped without a loss, else 12.
#   PUSH_TIMEOUT  seconds after which a push that does not end is ended and tried again. Default: 600, plus the time
#                 that the checkpoint takes at 10 MB/s.
#   DISK_GB       the size of the volume that you rent, if the file system shows more: the run must fit into it.
#   REMOVE_POD    1: remove this machine at the end, with SHUTDOWN_CMD or else `runpodctl pod delete $RUNPOD_POD_ID`. It
#                 is removed only if the weights are pushed, if PERSISTENT=1, or if there are no weights because training
#                 failed before the first save. If they cannot be pushed, it is stopped with STOP_CMD.
#   PERSISTENT    1: OUT outlives the machine, as a RunPod network volume does. A pod's own /workspace disk does not.
#   STOP_CMD      a command after which this machine costs less and OUT is still there. Default: on a RunPod pod with OUT
#                 below /workspace `runpodctl pod stop $RUNPOD_POD_ID`, else none.
#   REMOVE_DELAY  seconds to wait before the removal, in which `kill` can still prevent it. Default: 60.
#   KEEP_ON_FAILURE  1: keep the machine after a failure.
set -euo pipefail
HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

# ---- helpers ----

die() { echo "error: $*" >&2; exit 1; }

# Print a dated line. A full disk, which makes printf fail, must not end this script.
log() { printf '%s train.sh: %s\n' "$(date '+%F %T')" "$*" || true; }

# Print the ids of all processes of this run: torchrun and its ranks have TRAIN_RUN_DIR in their environment.
list_run_processes() { grep -lzsFx "TRAIN_RUN_DIR=$OUT" /proc/[0-9]*/environ | cut -d/ -f3; }

# Print the ids of the children of process $1. -s: a process may end while grep reads /proc.
list_children() { grep -lsx "PPid:[[:space:]]*$1" /proc/[0-9]*/status | cut -d/ -f3; }

# Whether process $1 is the supervisor of this run. After a reboot its number may be that of any other process, and a
# network volume may show the number of a process on another machine.
is_supervisor() { [[ $1 =~ ^[0-9]+$ ]] && grep -qzsFx "OUT=$OUT" "/proc/$1/environ"; }

# Print the path of the run's newest weights, or nothing.
find_newest_weights() { { compgen -G "$OUT/model_*.pt" || true; } | sort -V | tail -n 1; }

# Print words as a shell takes them, such as a command to paste.
quote() {
    local words
    printf -v words ' %q' "$@"
    echo "${words:1}"
}

# Print the command that calls this script from any folder: the next log-in may begin in another one.
self() {
    local script=$HERE/${BASH_SOURCE[0]##*/}
    if [[ -x $script ]]; then quote "$script"; else quote bash "$script"; fi
}

# Print the log to follow: OUT/train.log, or the newest log itself where the file system has no symbolic links.
find_log() {
    if [[ -L $OUT/train.log ]]; then
        echo "$OUT/train.log"
    else
        { compgen -G "$OUT/train-*.log" || true; } | sort | tail -n 1
    fi
}

# Print what this machine costs in a number of hours and a unit, as in "$480.00 a day (8 x $2.50 an hour)".
describe_cost() { # HOURS UNIT
    if [[ ! ${GPU_HOUR_USD:-0} =~ [1-9] ]]; then
        echo "what your cloud charges (GPU_HOUR_USD is not set)"
        return
    fi
    awk -v hours="$1" -v unit="$2" -v price="$GPU_HOUR_USD" -v gpus="$NPROC" \
        'BEGIN {printf "$%.2f %s (%d x $%.2f an hour)", hours * price * gpus, unit, gpus, price}'
}

# Whether this machine is known to be rented: then messages say what it costs.
is_rented() { [[ ${REMOVE_POD:-0} == 1 || -n ${RUNPOD_POD_ID:-} || ${GPU_HOUR_USD:-0} =~ [1-9] ]]; }

# Print how to remove this machine by hand.
describe_removal() {
    local default="remove it on your cloud's page"
    [[ -z ${RUNPOD_POD_ID:-} ]] || default="runpodctl pod delete $RUNPOD_POD_ID"
    echo "${SHUTDOWN_CMD:-$default}"
}

# ---- in the foreground: reject what would fail hours later, start the supervisor in the background, show its log ----

check_environment() {
    local name

    # The form of each value.
    for name in NPROC START_WAIT MAX_RESTARTS RESTART_DELAY PUSH_EVERY PUSH_TIMEOUT REMOVE_DELAY; do
        [[ ${!name:-0} =~ ^[0-9]+$ ]] || die "$name=${!name}: must be a whole number, as in $name=3 ./train.sh"
    done
    for name in BUDGET_USD GPU_HOUR_USD PUSH_RETRY_HOURS; do
        [[ ${!name:-0} =~ ^[0-9]*\.?[0-9]+$ ]] || die "$name=${!name}: must be a number, as in $name=2.5 ./train.sh"
    done
    for name in REMOVE_POD PERSISTENT PUSH_PUBLIC PUSH_OPTIMIZER KEEP_ON_FAILURE; do
        [[ ${!name:-0} == [01] ]] || die "$name=${!name}: must be 0 or 1, as in $name=1 ./train.sh"
    done
    [[ ${PUSH_TO:-a/b} =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]] ||
        die "PUSH_TO=$PUSH_TO: must be owner/name, as in PUSH_TO=me/gpt2-124m ./train.sh"
    [[ ${PUSH:-newest} =~ ^(newest|best|all)$ ]] || die "PUSH=$PUSH: must be newest, best or all"

    # Variables that need another one.
    for name in PUSH PUSH_PUBLIC PUSH_OPTIMIZER PUSH_EVERY PUSH_RETRY_HOURS PUSH_TIMEOUT; do
        [[ ${!name:-0} == 0 || -n ${PUSH_TO:-} ]] || die "$name=${!name} needs PUSH_TO=owner/name to push to"
    done
    [[ -z ${BUDGET_USD:-} || ${GPU_HOUR_USD:-0} =~ [1-9] ]] ||
        die "BUDGET_USD=$BUDGET_USD needs GPU_HOUR_USD, the price of one GPU for an hour"

    # Removing the machine must not remove the only copy of the weights, and there must be a command that does it.
    [[ ${REMOVE_POD:-0} == 1 ]] || return 0
    [[ -n ${PUSH_TO:-} || ${PERSISTENT:-0} == 1 ]] || die "REMOVE_POD=1 would remove the only copy of the weights:" \
        "set PUSH_TO=owner/name, or PERSISTENT=1 if the run folder outlives this machine (a network volume)"
    [[ -z ${SHUTDOWN_CMD:-} ]] || return 0
    hash runpodctl 2>/dev/null && [[ -n ${RUNPOD_POD_ID:-} ]] ||
        die "REMOVE_POD=1 needs runpodctl and RUNPOD_POD_ID, as on a RunPod pod; elsewhere set SHUTDOWN_CMD='...'"
    # The first command is that of runpodctl's version 2, the second that of version 1.
    export SHUTDOWN_CMD="runpodctl pod delete $RUNPOD_POD_ID || runpodctl remove pod $RUNPOD_POD_ID"
}

# Parse the arguments with the trainer's own parser and print, one a line: the run folder, --resume, --time-limit, the
# sizes of what will be pushed as flags of `hub.py check`, the number of GPUs. Arguments, data or a torch that the
# trainer would reject end the script here, with the trainer's message.
resolve_settings() {
    PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH} "$PY" -P - "$@" <<'END'
import os, sys, torch
import hub
from system.cli import run_cli
from system.machine import refuse_unusable_gpu
from tokens import shards
from training import checkpoint, presets

def main():
    # The same checks as in the trainer, in its order: arguments, data, GPU.
    cfg = presets.parse(sys.argv[1:], lambda path: checkpoint.read_train_state(path)["config"])
    if not cfg.data_dir.startswith("hf://"):
        for split in ("train", "val") if cfg.val_every else ("train",):
            shards.find_shards(cfg.data_dir, split)
    refuse_unusable_gpu(cfg.device)

    # What the rest of train.sh needs to know.
    gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count()
    sizes = os.environ.get("PUSH_TO") and hub.planned_sizes(cfg)
    flags = "--model-bytes %d --optimizer-bytes %d --saves %d" % sizes if sizes else ""
    print(cfg.run_dir.resolve(), cfg.resume, cfg.time_limit, flags, gpus, sep="\n")

run_cli(main)
END
}

# Start the run that the arguments describe.
launch() {
    local typed_command preset=() defaults=(--resume auto) checkpoint='' matches args
    local lock_status=0 settings time_limit gpus sizes where='' budget_seconds='' log_file at_end first_line
    local resume resume_words
    typed_command=$(quote "$0" "$@")
    check_environment

    # Defaults that the user's own flags override, because they come later. A budget replaces the time limit that a
    # checkpoint has saved.
    [[ -z ${GPU_HOUR_USD:-} ]] || defaults+=(--gpu-hour-usd "$GPU_HOUR_USD")
    [[ -z ${BUDGET_USD:-} ]] || defaults+=(--time-limit '')

    # The first argument may be a checkpoint or a preset.
    if [[ ${1:--} != -* && $1 == *.pt ]]; then
        # CHECKPOINT.pt [EPOCHS]: a name without a folder is looked for under log/. Resume from the folder, not from the
        # file: the run may have newer checkpoints.
        matches=("$1")
        [[ $1 == */* || -f $1 ]] || mapfile -t matches < <(find log -name "$1" -type f 2>/dev/null)
        ((${#matches[@]} == 1)) || die "$1: ${#matches[@]} such files under log/; give the path, as in log/RUN/$1"
        checkpoint=$(realpath -m "${matches[0]}")
        set -- --resume "${checkpoint%/*}" --epochs "${2:-1}" "${@:3}"
    elif [[ ${1:--} != -* ]]; then
        # The trainer wants the preset before all flags.
        preset=("$1")
        shift
    fi
    args=("${preset[@]}" "${defaults[@]}" "$@")

    # What the trainer makes of these arguments, and whether it would accept them.
    settings=$(resolve_settings "${args[@]}") || exit 1
    { read -r OUT && read -r RESUME && read -r time_limit && read -r sizes && read -r gpus; } <<<"$settings"

    # How to resume this run after a stop. A command that says where to begin (at a checkpoint, or --resume none) would
    # begin there again, which the trainer refuses once the run folder has a newer checkpoint: then name the run folder.
    resume="the same command"
    if [[ $RESUME != auto ]]; then
        resume_words=("${preset[@]}" "$@")
        [[ $(realpath -m "$RESUME") == "$OUT" ]] || resume_words+=(--resume "$OUT")
        resume="$(self) $(quote "${resume_words[@]}")    # with the same variables"
    fi

    # With another --out-dir this is a new run, which starts from exactly the checkpoint that was named.
    [[ -z $checkpoint || $OUT == "${checkpoint%/*}" ]] || args+=(--resume "$checkpoint")

    # Check that this token may write to the repository, and say whether the pushes fit into the account.
    if [[ -n ${PUSH_TO:-} ]]; then
        [[ -z $sizes ]] || sizes+=" --steps ${PUSH:-newest}"
        [[ -z $sizes || ${PUSH_EVERY:-0} == 0 ]] || sizes+=" --periodic"
        # shellcheck disable=SC2086 # these are several words
        "${HUB[@]}" check "$PUSH_TO" "${PUBLIC[@]}" $sizes || exit 1
    fi

    # The number of ranks: NPROC, or one per GPU, or one on a machine without GPUs.
    gpus=${NPROC:-$gpus}
    NPROC=$((gpus > 0 ? gpus : 1))
    ((gpus > 0)) || where=" on the CPU"

    # The budget becomes a time limit: dollars / (dollars an hour for all GPUs) * 3600 seconds.
    if [[ -n ${BUDGET_USD:-} ]]; then
        [[ -z $time_limit ]] || die "BUDGET_USD=$BUDGET_USD sets --time-limit: leave out --time-limit $time_limit"
        budget_seconds=$(awk -v budget="$BUDGET_USD" -v price="$GPU_HOUR_USD" -v gpus="$NPROC" \
            'BEGIN {printf "%d", budget / (price * gpus) * 3600}')
    fi

    # One run per folder. All processes started below inherit the lock (file descriptor 9), so the folder stays locked
    # while any of them lives.
    mkdir -p "$OUT"
    exec 9>>"$OUT/train.lock"
    flock -n 9 2>/dev/null || lock_status=$?

    # flock exits with 1 if somebody else holds the lock, and with another code if the file system has no locks, such as
    # Lustre mounted without -o flock. In the second case, look for the run's processes on this machine; the trainer
    # also takes a lock of its own, which works on such a file system (system/files.py).
    if ((lock_status == 1)) || [[ $lock_status != 0 && -n $(list_run_processes) ]]; then
        die "$OUT already has a run (processes: $(list_run_processes | tr '\n' ' ')): one run per folder." \
            "Stop it with: $(self) stop $(quote "$OUT"), or give another --out-dir"
    fi
    ((lock_status == 0)) || echo "warning: the file system of $OUT has no flock; only the trainer locks the folder" >&2

    # The log begins with the command as it was typed.
    log_file=$OUT/train-$(date +%Y%m%d-%H%M%S).log
    log "$typed_command" 2>/dev/null >>"$log_file"
    [[ -s $log_file ]] || die "cannot write to $log_file: is the disk full?"

    # OUT/train.log links to this log, also when the folder is moved. A file of that name that is no link is the user's.
    if [[ -L $OUT/train.log || ! -e $OUT/train.log ]]; then
        rm -f "$OUT/train.log.part"
        { ln -s "${log_file##*/}" "$OUT/train.log.part" && mv -fT "$OUT/train.log.part" "$OUT/train.log"; } 2>/dev/null ||
            rm -f "$OUT/train.log"
    fi

    # Say now, while somebody is there to read it, what will happen at the end.
    choose_stop_command
    at_end=$(describe_end)
    [[ -z $at_end ]] || echo "$at_end" >>"$log_file" || true
    first_line=$(($(wc -l <"$log_file") + 1))

    # Start the supervisor (this script with --detached) in a session of its own, which a logout does not end.
    export OUT RESUME NPROC BUDGET_SECONDS=$budget_seconds
    setsid bash "${BASH_SOURCE[0]}" --detached "${args[@]}" </dev/null >>"$log_file" 2>&1 &
    echo $! >"$OUT/train.pid"
    exec 9>&-

    # Say how to follow and stop the run, show its first seconds, and report one that has failed by then.
    echo "started: $NPROC process(es)$where, run folder $OUT, pid $!"
    echo "follow:  tail -F $(quote "$(find_log)")"
    echo "stop:    $(self) stop $(quote "$OUT")    # it saves first"
    echo "resume:  $resume"
    [[ -z $at_end ]] || echo "$at_end"
    ((${START_WAIT:-15} == 0)) || timeout "${START_WAIT:-15}" tail -n "+$first_line" -f -s 0.2 --pid=$! "$log_file" || true
    kill -0 $! 2>/dev/null || wait $! || die_at_once
}

# Report a run that has ended within its first seconds. torchrun prints a long traceback after the trainer's error, so
# the last line repeats the error.
die_at_once() {
    local reason
    STATUS_FILE=$OUT/status.json
    reason=$(read_status reason)
    echo "the run ended at once; its log: $(quote "$(find_log)")" >&2
    die "${reason:-it crashed: see its log}"
}

# Set STOP_CMD, unless the user has. On RunPod, stopping a pod ends the price of its GPUs and keeps /workspace, whether
# that is the pod's own disk or a network volume (docs.runpod.io/pods/manage-pods, November 2026). Other disks of a pod
# are lost.
choose_stop_command() {
    local mounted_at

    # Only if it may be needed, and on a disk that outlives a stop.
    [[ -z ${STOP_CMD:-} && ${REMOVE_POD:-0} == 1 && -n ${RUNPOD_POD_ID:-} ]] && hash runpodctl 2>/dev/null || return 0
    mounted_at=$(df --output=target "$OUT" 2>/dev/null | tail -n 1)
    [[ $mounted_at == /workspace* ]] || return 0

    # The first command is that of runpodctl's version 2, the second that of version 1.
    export STOP_CMD="runpodctl pod stop $RUNPOD_POD_ID || runpodctl stop pod $RUNPOD_POD_ID"
}

# Print for how many hours a failing last push is tried again: not long if the weights are safe without it, because
# waiting costs money.
retry_hours() {
    if [[ -n ${PUSH_RETRY_HOURS:-} ]]; then
        echo "$PUSH_RETRY_HOURS"
    elif [[ ${REMOVE_POD:-0} == 1 && (${PERSISTENT:-0} == 1 || -n ${STOP_CMD:-}) ]]; then
        echo 0.25
    else
        echo 12
    fi
}

# Print a number of hours, in minutes if it is less than one.
describe_hours() { awk -v h="$1" 'BEGIN { if (h < 1) printf "%g minutes", 60 * h; else printf "%g hours", h }'; }

# Print what will happen when training has ended, and what it costs.
describe_end() {
    local unsaved='this machine stays: it would hold the only copy' kind mounted_at budget=''

    # The push, for how long it is tried again, and what these tries may cost beyond the budget.
    if [[ -n ${PUSH_TO:-} ]]; then
        [[ -z ${BUDGET_USD:-} ]] || budget=", which BUDGET_USD does not cover: up to $(describe_cost "$(retry_hours)" more)"
        echo "at the end: push to $PUSH_TO; a push that fails is tried again for" \
            "$(describe_hours "$(retry_hours)") (PUSH_RETRY_HOURS)$budget"
    fi

    # PERSISTENT=1 lets this script remove the machine without a push: say where the run folder is.
    if [[ ${PERSISTENT:-0} == 1 ]]; then
        kind=$(df --output=fstype "$OUT" 2>/dev/null | tail -n 1)
        mounted_at=$(df --output=target "$OUT" 2>/dev/null | tail -n 1)
        echo "PERSISTENT=1: you say that $OUT outlives this machine; it is on $kind at $mounted_at"
        [[ ! $kind =~ ^(overlay|tmpfs)$ ]] || echo "warning: $kind is usually the machine's own storage, which is lost" \
            "with it: leave out PERSISTENT=1, or put the run folder on the volume (--out-dir)"
    fi

    # What becomes of the machine, also if the push fails.
    if [[ ${REMOVE_POD:-0} == 1 ]]; then
        [[ -z ${STOP_CMD:-} ]] || unsaved="this machine is stopped, with the weights on its disk ($STOP_CMD)"
        [[ ${PERSISTENT:-0} != 1 ]] || unsaved="this machine is removed all the same: PERSISTENT=1"
        echo "at the end: this machine is removed${PUSH_TO:+ once the weights are on the Hub. If they cannot be pushed, $unsaved}"
    elif is_rented; then
        echo "at the end: THIS MACHINE STAYS, AND COSTS $(describe_cost 24 "a day") until you remove it:" \
            "$(describe_removal), or start with REMOVE_POD=1"
    fi
}

# Ask the run of folder $1 to save and stop.
stop_run() {
    local pid
    (($# == 1)) || die "give the run folder, as in $(self) stop log/gpt2-124m"
    OUT=$(realpath -m "$1")
    STATUS_FILE=$OUT/status.json

    # The supervisor removes train.pid at its end: without that file nothing runs, and the status says how it ended.
    if [[ ! -e $OUT/train.pid ]]; then
        case $(read_status) in
            finished) echo "nothing to stop: the run in $OUT has finished" ;;
            stopped) echo "nothing to stop: the run in $OUT has saved and stopped already" ;;
            *_error) echo "nothing to stop: the run in $OUT has ended with an error; see $(quote "$(find_log)")" ;;
            *) die "$OUT has no train.pid: train.sh has no run there" ;;
        esac
        return
    fi

    # Signal the supervisor, and nobody else: it stops the ranks (handle_stop_signal).
    pid=$(cat "$OUT/train.pid")
    is_supervisor "$pid" || die "process $pid, named in $OUT/train.pid, is not this run's: the run was killed (by a" \
        "reboot, for example), or it is on another machine: then stop it there. Nothing was stopped"
    kill "$pid"

    # What to do next: watch it save, or move the run.
    echo "process $pid was asked to stop; it saves first: tail -F $(quote "$(find_log)")"
    echo "to move the run, once it has stopped:" \
        "$(quote "${HUB[@]}" push-model "$OUT" "${PUSH_TO:-OWNER/NAME}" --with-optimizer); on the next machine:" \
        "python hub.py pull-model ${PUSH_TO:-OWNER/NAME} $(quote "${OUT#"$HERE"/}"), then the same start command"
}

# ---- in the background: train, restart, publish, give the machine back ----

child_pid=''       # the process that run_child waits for
stop_requested=0   # whether this script has received SIGTERM or SIGINT
outcome=''         # how training ended: "finished", "stopped", "ended early..." or "failed..."
nothing_to_lose='' # the reason why removing this machine loses nothing; empty if it would

# Handle SIGTERM and SIGINT: ask the ranks to save and exit. The signal goes to torchrun's children, because torchrun
# itself would report a failure and kill the ranks after 30 seconds.
handle_stop_signal() {
    local rank_pids
    log "asked to stop: the trainer saves and exits"
    stop_requested=1

    # Without a child the caller's loop sees stop_requested. A child without children is no torchrun: end it.
    [[ -n $child_pid ]] || return 0
    mapfile -t rank_pids < <(list_children "$child_pid")
    kill -TERM "${rank_pids[@]:-$child_pid}" || true
}

# Run a command in the background and wait for it, so that signals are handled meanwhile. Returns its exit status.
run_child() {
    local exit_code=0
    "$@" &
    child_pid=$!
    # A signal may have come just before child_pid was set: its handler then had nothing to stop.
    ((!stop_requested)) || kill -TERM "$child_pid" || true
    wait "$child_pid" || exit_code=$?

    # A signal ends `wait`, not the child: wait again until the child has ended.
    while kill -0 "$child_pid" 2>/dev/null; do
        wait "$child_pid" && exit_code=0 || exit_code=$?
    done
    child_pid=''
    return $exit_code
}

# End what a killed torchrun has left on the GPUs: let the ranks save for a minute, then kill them.
stop_leftover_processes() {
    [[ -n $(list_run_processes) ]] || return 0
    log "asking the processes that torchrun left to save and exit"
    list_run_processes | xargs -r kill -TERM || true
    for _ in {1..240}; do
        sleep 0.25
        [[ -n $(list_run_processes) ]] || return 0
    done
    log "killing the processes that torchrun left"
    list_run_processes | xargs -r kill -KILL || true
    sleep 1
}

# Print how the trainer ended, as its status file says (write_status in system/cli.py): finished, stopped, user_error or
# system_error; with `reason`, why. Print nothing if there is no such file: then the trainer crashed before it could
# write one.
read_status() { # [reason]
    "$PY" -I -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$STATUS_FILE" "${1:-status}" \
        2>/dev/null || true
}

# Run the trainer, and restart it after a failure, until it finishes, is stopped, or has failed more than MAX_RESTARTS
# times. Sets outcome.
run_training() {
    local first_weights command attempt exit_code reason failures=0 max_restarts=${MAX_RESTARTS:-3}
    first_weights=$(find_newest_weights)
    command=("$PY" -m torch.distributed.run --standalone "--nproc_per_node=$NPROC" "$HERE/train_gpt2.py" "$@")

    # One pass for each start of the trainer.
    while [[ -z $outcome ]]; do
        attempt=("${command[@]}")
        # A restart resumes from a checkpoint of this run. Until there is one, the user's own --resume applies.
        [[ $RESUME == auto || $(find_newest_weights) == "$first_weights" ]] || attempt+=(--resume "$OUT")
        # The budget covers all restarts: what is left of it is the next time limit.
        [[ -z $BUDGET_SECONDS ]] ||
            attempt+=(--time-limit "$((BUDGET_SECONDS > SECONDS ? BUDGET_SECONDS - SECONDS : 1))")

        # Train. The status of an earlier start must not be mistaken for that of this start.
        log "start $((failures + 1)): ${attempt[*]}"
        rm -f "$STATUS_FILE" || true
        exit_code=0
        run_child env TRAIN_RUN_DIR="$OUT" TRAIN_STATUS_FILE="$STATUS_FILE" "${attempt[@]}" || exit_code=$?
        stop_leftover_processes

        # Decide by the stop request, the exit code and the status what comes next: the end, or a restart.
        if ((stop_requested)); then
            outcome=stopped
            break
        fi
        case "$exit_code $(read_status)" in
            "0 stopped") outcome="ended early: see the line above" ;; # by --time-limit, or a signal to the ranks alone
            "0 "*) outcome=finished ;;
            *" user_error") # the same command would fail again; torchrun has printed a traceback since: repeat the error
                reason=$(read_status reason)
                outcome="failed: ${reason:-see the error above}"
                ;;
            *) # a system error, which may pass, or a crash
                if ((failures >= max_restarts)); then
                    outcome="failed: exit code $exit_code, no restarts left"
                    break
                fi
                failures=$((failures + 1))
                log "exit code $exit_code: restart $failures of $max_restarts in ${RESTART_DELAY:-10} seconds"
                run_child sleep "${RESTART_DELAY:-10}" || true
                ((!stop_requested)) || outcome=stopped
                ;;
        esac
    done
    log "training $outcome"
}

# While training continues, push each new complete checkpoint every PUSH_EVERY seconds.
push_periodically() {
    local last_pushed='' newest
    # $$ is the supervisor: this loop ends with it.
    while sleep "$PUSH_EVERY" && kill -0 $$; do
        newest=$(find_newest_weights)
        # Weights without their optimizer state cannot be resumed: push complete checkpoints only.
        [[ $newest != "$last_pushed" && -f ${newest/model_/optim_} ]] || continue

        # In a subshell, because push_once replaces its shell.
        log "pushing ${newest##*/} to $PUSH_TO while training continues"
        # --temporary: a later push may remove this checkpoint, because resuming needs only the newest one.
        if (push_once "$(push_seconds)" nice "${HUB[@]}" push-model "$OUT" "$PUSH_TO" "${PUBLIC[@]}" \
            --with-optimizer --temporary); then
            last_pushed=$newest
        else
            log "that push failed; next try in $PUSH_EVERY seconds"
        fi
    done
}

# Print after how many seconds a push is ended. A transfer to the Hub's Xet storage can hang for ever.
push_seconds() {
    local newest files
    if [[ -n ${PUSH_TIMEOUT:-} ]]; then
        echo "$PUSH_TIMEOUT"
        return
    fi

    # 600 seconds, and the size of all files at 10 MB/s, which is 1e7 bytes a second.
    newest=$(find_newest_weights)
    files=("$newest" "${newest/model_/optim_}")
    [[ ${PUSH:-newest} != all ]] || files=("$OUT"/model_*.pt "$OUT"/optim_*.pt)
    { stat --format %s "${files[@]}" 2>/dev/null || true; } | awk '{n += $1} END {printf "%d", 600 + n / 1e7}'
}

# Print the command that saves a token of the Hub. It is read in the log, perhaps in a shell without .venv/bin on PATH.
log_in_command() {
    local hf=${PY%/*}/hf
    [[ -x $hf ]] || hf=hf
    echo "$(quote "$hf") auth login"
}

# Replace this (sub)shell with the command of a push, which is ended after $1 seconds.
push_once() { # SECONDS COMMAND...
    local variables=() token_file=${HF_TOKEN_PATH:-${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}/token}
    # A token that `hf auth login` has saved since the start replaces the environment's, which may have expired.
    [[ ! $token_file -nt $STARTED_FILE ]] || variables=(-u HF_TOKEN -u HUGGING_FACE_HUB_TOKEN)
    # --foreground: the push stays in this process group, so that killing the pusher's group ends the push, too.
    exec env "${variables[@]}" timeout --foreground --kill-after=30 "$1" "${@:2}"
}

# Push the checkpoints at the end of training, and again for PUSH_RETRY_HOURS if that fails. Sets nothing_to_lose if it
# succeeds.
push_at_end() {
    local push=("${HUB[@]}" push-model "$OUT" "$PUSH_TO" "${PUBLIC[@]}" --steps "${PUSH:-newest}")
    local try=0 pause=10 limit now deadline exit_code advice

    # A run that is not finished needs its optimizer state to be resumed elsewhere; a finished one, for more epochs.
    [[ $outcome == finished && ${PUSH_OPTIMIZER:-0} != 1 ]] || ! compgen -G "$OUT/optim_*.pt" >/dev/null || push+=(--with-optimizer)

    # How long a try may take, and when the last one may begin.
    limit=$(push_seconds)
    deadline=$(awk -v now="$(date +%s)" -v hours="$(retry_hours)" 'BEGIN {printf "%d", now + hours * 3600}')

    while true; do
        # One try, which a stop request interrupts.
        try=$((try + 1))
        log "push to $PUSH_TO, try $try, for at most $limit seconds"
        exit_code=0
        run_child push_once "$limit" "${push[@]}" || exit_code=$?
        if ((exit_code == 0)); then
            nothing_to_lose="the weights are at $PUSH_TO"
            log "$nothing_to_lose"
            return
        fi
        ((!stop_requested)) || break

        # timeout's exit codes for a command that it ended. A slow network needs more time.
        if ((exit_code == 124 || exit_code == 137)); then
            log "that push did not end in $limit seconds"
            limit=$((limit * 2))
        fi

        # Give up at the deadline. The pauses double, up to ten minutes.
        now=$(date +%s)
        ((now + pause <= deadline)) || break

        # Another token helps only if this one was refused: 77 (the exit codes are listed in system/cli.py).
        advice=''
        ((exit_code != 77)) || advice=". If the token has expired, run on this machine: $(log_in_command)"
        log "that push failed: the reason is above. Next try in $pause seconds, the last one in" \
            "$(((deadline - now + 59) / 60)) minutes$advice"
        run_child sleep "$pause" || true
        ((!stop_requested)) || break
        pause=$((pause * 2 < 600 ? pause * 2 : 600))
    done
    log "the push failed; to push by hand: $(quote "${push[@]}")"
}

# Say why this machine stays, what that costs, and how to end it.
keep_machine() { # REASON
    log "this machine stays: $1"
    if is_rented; then
        log "it costs $(describe_cost 1 "an hour"), until you remove it: $(describe_removal)"
    fi
}

# Wait REMOVE_DELAY seconds. Fails if this script was asked to stop meanwhile, which keeps the machine.
wait_for_objection() {
    run_child sleep "${REMOVE_DELAY:-60}" || true
    if ((stop_requested)); then
        keep_machine "asked to stop"
        return 1
    fi
}

# Give this machine back, after a delay in which `kill` keeps it.
remove_machine() {
    log "$nothing_to_lose: this machine will be removed in ${REMOVE_DELAY:-60} seconds; to keep it: kill $$"
    wait_for_objection || return 0
    log "running: $SHUTDOWN_CMD"
    bash -c "$SHUTDOWN_CMD" || report_running_machine $?
}

# Say that the command to remove or stop this machine has failed.
report_running_machine() { # EXIT_CODE
    log "THAT FAILED (exit code $1): this machine is still running, and costs $(describe_cost 1 "an hour");" \
        "remove it by hand: $(describe_removal)"
}

# Stop this machine, which has the only copy of the weights on a disk that a stop does not erase, after a delay in which
# `kill` keeps it running.
stop_machine() {
    log "this machine holds the only copy of the weights, on a disk that outlives a stop: it will be stopped in" \
        "${REMOVE_DELAY:-60} seconds; to keep it running: kill $$"
    wait_for_objection || return 0
    log "start it again and push, then remove it; until then you pay for its disk. Running: $STOP_CMD"
    bash -c "$STOP_CMD" || report_running_machine $?
}

# After training: publish the weights, then remove the machine if nothing can be lost by that.
publish_and_remove() {
    # Whoever stopped the run by hand decides what comes next.
    if ((stop_requested)); then
        keep_machine "stopped on request; nothing is pushed"
        return
    fi

    # Find the reason, if there is one, why removing this machine loses nothing.
    if [[ -z $(find_newest_weights) ]]; then
        nothing_to_lose="there is no checkpoint to lose"
    else
        [[ -z ${PUSH_TO:-} ]] || push_at_end
        if [[ -z $nothing_to_lose && ${PERSISTENT:-0} == 1 ]]; then
            nothing_to_lose="the weights are on persistent storage${PUSH_TO:+, and not at $PUSH_TO}"
        fi
    fi

    # The user's wishes come first, then the safety of the weights.
    if ((stop_requested)); then
        keep_machine "asked to stop while it pushed"
    elif [[ ${REMOVE_POD:-0} != 1 ]]; then
        keep_machine "REMOVE_POD is not 1"
    elif [[ $outcome == failed* && ${KEEP_ON_FAILURE:-0} == 1 ]]; then
        keep_machine "KEEP_ON_FAILURE=1"
    elif [[ -n $nothing_to_lose ]]; then
        remove_machine
    elif [[ -n ${STOP_CMD:-} ]]; then
        stop_machine
    else
        keep_machine "it holds the only copy of the weights"
    fi
}

# The background process: everything from the first start of the trainer to the removal of the machine.
supervise() {
    local pusher_pid=''
    STATUS_FILE=$OUT/status.json
    STARTED_FILE=$OUT/train.pid # written at this start: its time is the start's
    trap handle_stop_signal TERM INT
    trap '' HUP # a logout

    # Keep compiled code in the project's folder, which may be on a network volume: the next pod then has it, too.
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HERE/.cache}
    # After a signal torchrun gives its ranks this many seconds to save, then kills them; its default is 30.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

    # What the budget of dollars is in seconds.
    [[ -z $BUDGET_SECONDS ]] || log "budget: $BUDGET_USD USD at $GPU_HOUR_USD an hour for each of $NPROC GPUs:" \
        "$BUDGET_SECONDS seconds, with restarts"

    # Job control (set -m) gives the pusher a process group of its own, so that one kill ends it with its children. It
    # must not hold the lock of the run folder (file descriptor 9).
    if [[ ${PUSH_EVERY:-0} != 0 ]]; then
        set -m
        push_periodically 9>&- &
        pusher_pid=$!
        set +m
    fi

    # Train, end the pusher, publish. Without train.pid, `stop` knows that nothing runs.
    run_training "$@"
    [[ -z $pusher_pid ]] || { kill -- "-$pusher_pid"; wait "$pusher_pid"; } 2>/dev/null || true
    publish_and_remove
    rm -f "$OUT/train.pid"
    [[ $outcome != failed* ]]
}

# ---- main ----

hash flock setsid realpath || die "on Linux install util-linux and coreutils; elsewhere run python train_gpt2.py itself"

# The project's Python or, where it was installed otherwise, that of the shell.
PY=$HERE/.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python || command -v python3) || die "no python on PATH; run: make install"

# The words of every call of hub.py, and the flag of those that may publish.
HUB=("$PY" "$HERE/hub.py")
PUBLIC=()
[[ ${PUSH_PUBLIC:-0} != 1 ]] || PUBLIC=(--public)

# The first word says what to do; --help prints the comment at the top of this file.
case ${1:-} in
    -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" ;;
    --detached) supervise "${@:2}" ;;
    stop) stop_run "${@:2}" ;;
    *) launch "$@" ;;
esac
