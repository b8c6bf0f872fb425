#!/usr/bin/env bash
# Train in the background: survives logout, restarts after failures, publishes, gives the machine back.
#
#   ./train.sh                                  # gpt2-124m on every GPU here, into log/gpt2-124m
#   ./train.sh speedrun-124m --out-dir log/fast # any arguments of train_gpt2.py
#   ./train.sh model_19072.pt 2                 # continue that checkpoint's run until 2 epochs are done
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 BUDGET_USD=30 GPU_HOUR_USD=2.5 ./train.sh
#
# A folder that holds a run is resumed, never restarted. Every decision is logged in OUT/train-<time>.log. Environment:
#   NPROC         processes (default: one per GPU, or one without); START_WAIT: seconds of log to show at first (15)
#   MAX_RESTARTS  restarts after failures (3), RESTART_DELAY seconds apart (10); none after an "error:" you must fix
#   BUDGET_USD    with GPU_HOUR_USD, the price of one GPU for an hour: save and stop once this start has spent it
#   PUSH_TO       owner/name: at the end, push a checkpoint there (hub.py push-model) and wait for it; also the newest
#                 with its optimizer if the run is not finished (budget, time limit, failure), so that it can resume
#                 elsewhere. That the token may write there is checked before anything starts
#   PUSH          which checkpoints at the end: newest (the default), best (the lowest val loss) or all
#   PUSH_PUBLIC   1: that repository is public, or is to be, if it is made now; otherwise it is private
#   PUSH_EVERY    with PUSH_TO: also push new checkpoints, with their optimizer, every so many seconds (0: only at the
#                 end): if the machine is taken away, only the work of that time and of --save-every steps is lost
#   REMOVE_POD    1: afterwards remove this machine, with SHUTDOWN_CMD or else runpodctl pod delete $RUNPOD_POD_ID; only
#                 once the weights are pushed or, without PUSH_TO, if PERSISTENT=1 says that OUT outlives the machine
#                 (as a RunPod network volume does; a pod's own /workspace disk is deleted with the pod), or if there
#                 are none, because training failed before its first save
#   REMOVE_DELAY  seconds during which `kill` can keep the machine (60); KEEP_ON_FAILURE=1 keeps it after a failure
set -euo pipefail
HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

die() { echo "error: $*" >&2; exit 1; }
say() { printf '%s train.sh: %s\n' "$(date '+%F %T')" "$*" || true; } # a full disk must not end the watcher
ranks() { grep -lzsFx "TRAIN_RUN_DIR=$OUT" /proc/[0-9]*/environ | cut -d/ -f3; } # torchrun and the ranks of this run
children() { grep -lsx "PPid:[[:space:]]*$1" /proc/[0-9]*/status | cut -d/ -f3; } # -s: one may have just ended
newest() { { compgen -G "$OUT/model_*.pt" || true; } | sort -V | tail -n 1; } # the run's newest weights, if any

# ---- in the foreground: reject what would fail hours later, start the rest detached, show its first seconds ----

check_environment() {
    local name
    for name in NPROC START_WAIT MAX_RESTARTS RESTART_DELAY PUSH_EVERY REMOVE_DELAY; do
        [[ ${!name:-0} =~ ^[0-9]+$ ]] || die "$name=${!name}: must be a whole number, as in $name=3 ./train.sh"
    done
    for name in BUDGET_USD GPU_HOUR_USD; do
        [[ ${!name:-0} =~ ^[0-9]*\.?[0-9]+$ ]] || die "$name=${!name}: must be a number, as in $name=2.5 ./train.sh"
    done
    [[ ${PUSH_TO:-a/b} =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]] ||
        die "PUSH_TO=$PUSH_TO: must be owner/name, as in PUSH_TO=me/gpt2-124m ./train.sh"
    [[ ${PUSH:-newest} =~ ^(newest|best|all)$ ]] || die "PUSH=$PUSH: must be newest, best or all"
    for name in PUSH PUSH_PUBLIC PUSH_EVERY; do
        [[ ${!name:-0} == 0 || -n ${PUSH_TO:-} ]] || die "$name=${!name} needs PUSH_TO=owner/name to push to"
    done
    [[ -z ${BUDGET_USD:-} || ${GPU_HOUR_USD:-0} =~ [1-9] ]] ||
        die "BUDGET_USD=$BUDGET_USD needs GPU_HOUR_USD, the price of one GPU for an hour"
    [[ ${REMOVE_POD:-0} == 1 ]] || return 0
    [[ -n ${PUSH_TO:-} || ${PERSISTENT:-0} == 1 ]] || die "REMOVE_POD=1 would remove the only copy of the weights:" \
        "set PUSH_TO=owner/name, or PERSISTENT=1 if the run folder outlives this machine (a network volume)"
    [[ -z ${SHUTDOWN_CMD:-} ]] || return 0
    hash runpodctl 2>/dev/null && [[ -n ${RUNPOD_POD_ID:-} ]] ||
        die "REMOVE_POD=1 needs runpodctl and RUNPOD_POD_ID, as on a RunPod pod; elsewhere set SHUTDOWN_CMD='...'"
    # the words of version 2 of runpodctl, then of 1
    export SHUTDOWN_CMD="runpodctl pod delete $RUNPOD_POD_ID || runpodctl remove pod $RUNPOD_POD_ID"
}

settings() { # what the trainer makes of the arguments, one a line; what it would reject ends here, in its own words
    PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH} "$PY" -P - "$@" <<'END'
import sys, torch
from system.script import run_cli
from tokens import shards
from training import checkpoint, presets

def main():
    cfg = presets.parse(sys.argv[1:], lambda path: checkpoint.read_train_state(path)["config"])
    if not cfg.data_dir.startswith("hf://"):
        for split in ("train", "val") if cfg.val_every else ("train",):
            shards.find_shards(cfg.data_dir, split)
    gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count()
    print(cfg.run_dir.resolve(), cfg.resume, cfg.time_limit, gpus, sep="\n")

run_cli(main)
END
}

launch() { # start the run that the arguments describe
    local preset=() defaults=(--resume auto) checkpoint='' typed="$0 $*" args found text time_limit gpus log limit='' where=''
    check_environment
    [[ -z ${PUSH_TO:-} ]] || "${HUB[@]}" check "$PUSH_TO" "${PUBLIC[@]}" || exit 1
    [[ -z ${GPU_HOUR_USD:-} ]] || defaults+=(--gpu-hour-usd "$GPU_HOUR_USD")
    [[ -z ${BUDGET_USD:-} ]] || defaults+=(--time-limit '') # not the one that a checkpoint has saved
    if [[ ${1:--} != -* && $1 == *.pt ]]; then # CHECKPOINT [EPOCHS]
        found=("$1")
        [[ $1 == */* || -f $1 ]] || mapfile -t found < <(find log -name "$1" -type f 2>/dev/null)
        ((${#found[@]} == 1)) || die "$1: ${#found[@]} such files under log/; give the path, as in log/RUN/$1"
        checkpoint=$(realpath -m "${found[0]}")
        set -- --resume "${checkpoint%/*}" --epochs "${2:-1}" "${@:3}" # the folder: the run may be past that checkpoint
    elif [[ ${1:--} != -* ]]; then
        preset=("$1")
        shift
    fi
    args=("${preset[@]}" "${defaults[@]}" "$@") # a flag that is given again replaces the default
    text=$(settings "${args[@]}") || exit 1
    { read -r OUT && read -r RESUME && read -r time_limit && read -r gpus; } <<<"$text"
    # in another folder it is not the same run that goes on, but one that starts from the very checkpoint
    [[ -z $checkpoint || $OUT == "${checkpoint%/*}" ]] || args+=(--resume "$checkpoint")
    gpus=${NPROC:-$gpus}
    NPROC=$((gpus > 0 ? gpus : 1))
    ((gpus > 0)) || where=" on the CPU"
    if [[ -n ${BUDGET_USD:-} ]]; then
        [[ -z $time_limit ]] || die "BUDGET_USD=$BUDGET_USD sets --time-limit: leave out --time-limit $time_limit"
        limit=$(awk -v b="$BUDGET_USD" -v p="$GPU_HOUR_USD" -v n="$NPROC" 'BEGIN {printf "%d", b / (p * n) * 3600}')
    fi

    mkdir -p "$OUT"
    exec 9>>"$OUT/train.lock" # inherited by all that follows: locked while any part of the run lives
    flock -n 9 || die "$OUT already has a run (processes: $(ranks | tr '\n' ' ')): one run per folder. Stop it with:" \
        "kill \$(cat $OUT/train.pid), or give another --out-dir"
    log=$OUT/train-$(date +%Y%m%d-%H%M%S).log
    say "$typed" 2>/dev/null >>"$log"
    [[ -s $log ]] || die "cannot write to $log: is the disk full?"
    export OUT RESUME NPROC LIMIT=$limit LOG=$log
    setsid bash "${BASH_SOURCE[0]}" --detached "${args[@]}" </dev/null >>"$log" 2>&1 &
    echo $! >"$OUT/train.pid"
    exec 9>&-
    echo "started: $NPROC process(es)$where, run folder $OUT, pid $!"
    echo "follow:  tail -f ${log@Q}"
    echo "stop:    kill \$(cat ${OUT@Q}/train.pid)    # it saves first; the same command resumes from there"
    ((${START_WAIT:-15} == 0)) || timeout "${START_WAIT:-15}" tail -n +1 -f --pid=$! "$log" || true
    kill -0 $! 2>/dev/null || wait $! || die "the run ended at once; see its log: $log"
}

# ---- detached: run, restart, publish, leave ----

child=''   # what we wait for
stopping=0 # whether we were asked to stop
outcome='' # how training ended: finished, stopped, ended early or failed
saved=''   # why nothing is lost if this machine goes

stop() { # the ranks save and exit 0 by themselves; torchrun would give them 30 seconds and report a failure
    local pids
    say "asked to stop: the trainer saves and exits"
    stopping=1
    [[ -n $child ]] || return 0
    mapfile -t pids < <(children "$child")
    kill -TERM "${pids[@]:-$child}" || true
}

attend() { # run a command and return its exit status; meanwhile signals reach us and, through stop(), the command
    local status=0
    "$@" &
    child=$!
    ((!stopping)) || kill -TERM "$child" || true # asked just before
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # only a signal has ended the wait
        wait "$child" && status=0 || status=$?
    done
    child=''
    return $status
}

reap() { # a killed torchrun leaves its ranks on the GPUs: let them save, then kill what remains
    [[ -n $(ranks) ]] || return 0
    say "asking the processes it left to save and exit"
    ranks | xargs -r kill -TERM || true
    for _ in {1..60}; do
        sleep 1
        [[ -n $(ranks) ]] || return 0
    done
    say "killing the processes it left"
    ranks | xargs -r kill -KILL || true
    sleep 1
}

train() { # again after a failure, until it finishes, stops, or fails once too often; sets outcome
    local before command start status from failures=0
    before=$(newest)
    command=("$PY" -m torch.distributed.run --standalone "--nproc_per_node=$NPROC" "$HERE/train_gpt2.py" "$@")
    said() { grep -q "^$1" < <(tail -c "+$((from + 1))" "$LOG"); } # in the log since the last start
    while [[ -z $outcome ]]; do
        start=("${command[@]}")
        # a restart resumes from a checkpoint of this run; until there is one, the --resume that was given applies
        [[ $RESUME == auto || $(newest) == "$before" ]] || start+=(--resume "$OUT")
        [[ -z $LIMIT ]] || start+=(--time-limit "$((LIMIT > SECONDS ? LIMIT - SECONDS : 1))")
        say "start $((failures + 1)): ${start[*]}"
        from=$(stat -c %s "$LOG") status=0
        attend env TRAIN_RUN_DIR="$OUT" "${start[@]}" || status=$?
        reap
        if ((stopping)); then outcome=stopped
        elif ((status == 0)) && said "stopped by "; then outcome="ended early: see the line above"
        elif ((status == 0)); then outcome=finished
        elif said "error: "; then outcome="failed: see the error above" # the same command would fail again
        elif ((failures++ >= ${MAX_RESTARTS:-3})); then outcome="failed: exit code $status, no restarts left"
        else
            say "exit code $status: restart $failures of ${MAX_RESTARTS:-3} in ${RESTART_DELAY:-10} seconds"
            attend sleep "${RESTART_DELAY:-10}" || true
            ((!stopping)) || outcome=stopped
        fi
    done
    say "training $outcome"
}

publish_often() { # while training goes on: push what is new since the last push
    local last='' now
    while sleep "$PUSH_EVERY" && kill -0 $$; do
        now=$(newest)
        [[ $now != "$last" && -f ${now/model_/optim_} ]] || continue
        say "pushing ${now##*/} to $PUSH_TO while training continues"
        if nice "${HUB[@]}" push-model "$OUT" "$PUSH_TO" "${PUBLIC[@]}" --with-optimizer; then last=$now
        else say "that push failed; next try in $PUSH_EVERY seconds"; fi
    done
}

publish() { # sets saved, unless this machine holds the only copy
    local push=("${HUB[@]}" push-model "$OUT" "$PUSH_TO" "${PUBLIC[@]}" --steps "${PUSH:-newest}") try
    # an unfinished run must be able to resume elsewhere
    [[ $outcome == finished ]] || ! compgen -G "$OUT/optim_*.pt" >/dev/null || push+=(--with-optimizer)
    for try in 1 2 3; do
        say "push to $PUSH_TO, try $try of 3"
        if attend "${push[@]}"; then saved="the weights are at $PUSH_TO"; break; fi
        ((try == 3)) || attend sleep "${RESTART_DELAY:-10}" || true
        ((!stopping)) || break
    done
    say "${saved:-the push failed; to push by hand: ${push[*]}}"
}

remove() { # give this machine back
    say "$saved: this machine will be removed in ${REMOVE_DELAY:-60} seconds; to keep it: kill $$"
    attend sleep "${REMOVE_DELAY:-60}" || true
    if ((stopping)); then say "this machine stays: asked to stop"; return; fi
    say "running: $SHUTDOWN_CMD"
    bash -c "$SHUTDOWN_CMD" ||
        say "THAT FAILED (exit code $?): this machine is still running and costing money; remove it by hand"
}

leave() { # publish, then give the machine back if that loses nothing
    if ((stopping)); then say "stopped on request: nothing is pushed, this machine stays"; return; fi
    if [[ -z $(newest) ]]; then saved="there is no checkpoint to lose"
    elif [[ -n ${PUSH_TO:-} ]]; then publish
    elif [[ ${PERSISTENT:-0} == 1 ]]; then saved="the weights are on persistent storage"; fi
    if [[ ${REMOVE_POD:-0} != 1 ]]; then say "this machine stays: REMOVE_POD is not 1"
    elif [[ -z $saved ]]; then say "this machine stays: it holds the only copy of the weights"
    elif [[ $outcome == failed* && ${KEEP_ON_FAILURE:-0} == 1 ]]; then say "this machine stays: KEEP_ON_FAILURE=1"
    else remove; fi
}

watch() { # the run from its start to the end of this machine
    local publisher=''
    trap stop TERM INT
    trap '' HUP
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HERE/.cache} # a volume keeps compiled code, /tmp may not
    [[ -z $LIMIT ]] ||
        say "budget: $BUDGET_USD USD at $GPU_HOUR_USD an hour for each of $NPROC GPUs: $LIMIT seconds, with restarts"
    if [[ ${PUSH_EVERY:-0} != 0 ]]; then
        set -m # a process group of its own, which ends as one
        publish_often 9>&- &
        publisher=$!
        set +m
    fi
    train "$@"
    [[ -z $publisher ]] || { kill -- "-$publisher"; wait "$publisher"; } 2>/dev/null || true
    leave
    rm -f "$OUT/train.pid"
    [[ $outcome != failed* ]]
}

# ---- which of the two this is ----

hash flock setsid realpath || die "on Linux install util-linux and coreutils; elsewhere run python train_gpt2.py itself"
PY=$HERE/.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python || command -v python3) || die "no python on PATH; run: make install"
HUB=("$PY" "$HERE/hub.py") PUBLIC=()
[[ ${PUSH_PUBLIC:-0} != 1 ]] || PUBLIC=(--public)
case ${1:-} in
    -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" ;;
    --detached) watch "${@:2}" ;;
    *) launch "$@" ;;
esac
