#!/usr/bin/env bash
# Train in the background: survives logout, restarts after failures, publishes, gives the machine back.
#
#   ./train.sh                                  # gpt2-124m on every GPU here, into log/gpt2-124m
#   ./train.sh speedrun-124m --out-dir log/fast # any arguments of train_gpt2.py
#   ./train.sh model_19072.pt 2                 # continue from that checkpoint until 2 epochs are done
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 BUDGET_USD=30 GPU_HOUR_USD=2.5 ./train.sh
#
# A folder that holds a run is resumed, never restarted. Every decision is logged in OUT/train-<time>.log. Environment:
#   NPROC         processes (default: one per GPU, or one without); START_WAIT: seconds of log to show at first (15)
#   MAX_RESTARTS  restarts after failures (3), RESTART_DELAY seconds apart (10); none after an "error:" you must fix
#   BUDGET_USD    with GPU_HOUR_USD, the price of one GPU for an hour: save and stop once this start has spent it
#   PUSH_TO       owner/name: at the end, push the newest checkpoint there (hub.py push-model) and wait for it; with its
#                 optimizer if the run is not finished (budget, time limit, failure), so that it can resume elsewhere
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

case ${1:-} in -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
hash flock setsid realpath || die "on Linux install util-linux and coreutils; elsewhere run python train_gpt2.py itself"
PY=$HERE/.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python || command -v python3) || die "no python on PATH; run: make install"

flag() { # value of the train_gpt2.py flag $1 in the arguments (the last one counts), or nothing
    local i value=
    for ((i = 0; i < ${#args[@]}; i++)); do
        case ${args[i]} in
            "--$1="* | "--${1//-/_}="*) value=${args[i]#*=} ;;
            "--$1" | "--${1//-/_}") value=${args[i + 1]:-} ;;
        esac
    done
    printf '%s' "$value"
}
args=("$@")
if [[ ${1:-} == *.pt ]]; then # the old form: checkpoint, epochs
    found=("$1")
    [[ $1 == */* || -f $1 ]] || mapfile -t found < <(find log -name "$1" -type f 2>/dev/null)
    ((${#found[@]} == 1)) || die "$1: ${#found[@]} such files under log/; give the path, as in ./train.sh log/RUN/$1 2"
    [[ ${2:-1} =~ ^[1-9][0-9]*$ ]] || die "epochs $2: must be a whole number of at least 1, as in ./train.sh $1 2"
    from=$(realpath -m "${found[0]}")
    there=$(compgen -G "${from%/*}/model_*.pt" || true)
    if [[ -z $(flag out-dir) || $(realpath -m "$(flag out-dir)") == "${from%/*}" ]]; then # given again, it goes on
        newest=$(printf '%s\n' "$from" "$there" | sort -V | tail -n 1)
        [[ $newest == "$from" ]] || echo "the run is past ${from##*/}: going on from ${newest##*/}"
        from=$newest
    fi
    [[ -f $from ]] || die "no checkpoint $1; there: ${there//$'\n'/ }"
    set -- --resume "$from" --epochs "${2:-1}" "${@:3}" # no preset: the checkpoint has its settings
    args=("$@")
fi
preset=gpt2-124m OUT=$(flag out-dir) resume=$(flag resume)
if [[ ${1:--} != -* ]]; then preset=$1; elif [[ $resume == *.pt ]]; then OUT=${OUT:-$(dirname "$resume")}; fi
OUT=$(realpath -m "${OUT:-log/$preset}")
if [[ -n ${NPROC:-} ]]; then gpus=$NPROC
elif [[ $(flag device) == cpu ]]; then gpus=0
elif [[ -v CUDA_VISIBLE_DEVICES ]]; then gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv '^-1$\|^$' || true)
else gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU ' || true); fi
[[ $gpus =~ ^[0-9]+$ ]] || die "NPROC=$gpus: must be a whole number, as in NPROC=2 ./train.sh"
nproc=$((gpus > 0 ? gpus : 1))
marked() { grep -lzsFx "TRAIN_RUN_DIR=$OUT" /proc/[0-9]*/environ | cut -d/ -f3; } # torchrun and ranks of this run

# ---- in the foreground: reject what would fail hours later, start the rest detached, show its first seconds ----
if [[ -z ${TRAIN_SH_LOG:-} ]]; then
    for name in MAX_RESTARTS RESTART_DELAY REMOVE_DELAY START_WAIT PUSH_EVERY BUDGET_USD GPU_HOUR_USD; do
        [[ ${!name:-0} =~ ^[0-9]+$ || ($name == *_USD && ${!name} =~ ^[0-9]*\.[0-9]+$) ]] ||
            die "$name=${!name}: must be a number, as in $name=3 ./train.sh"
    done
    [[ ${PUSH_TO:-a/b} =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]] ||
        die "PUSH_TO=$PUSH_TO: must be owner/name, as in PUSH_TO=me/gpt2-124m ./train.sh"
    [[ ${PUSH_EVERY:-0} == 0 || -n ${PUSH_TO:-} ]] || die "PUSH_EVERY=$PUSH_EVERY needs PUSH_TO=owner/name to push to"
    [[ -z ${BUDGET_USD:-} || (${GPU_HOUR_USD:-0} =~ [1-9] && -z $(flag time-limit)) ]] ||
        die "BUDGET_USD=$BUDGET_USD sets --time-limit: give GPU_HOUR_USD, one GPU's price per hour, and no --time-limit"
    if [[ ${REMOVE_POD:-0} == 1 ]]; then
        [[ -n ${PUSH_TO:-} || ${PERSISTENT:-0} == 1 ]] || die "REMOVE_POD=1 would remove the only copy of the" \
            "weights: set PUSH_TO=owner/name, or PERSISTENT=1 if $OUT outlives this machine (a network volume)"
        [[ -n ${SHUTDOWN_CMD:-} ]] || { command -v runpodctl >/dev/null && [[ -n ${RUNPOD_POD_ID:-} ]]; } ||
            die "REMOVE_POD=1 needs runpodctl and RUNPOD_POD_ID, as on a RunPod pod; elsewhere set SHUTDOWN_CMD='...'"
    fi
    # what the trainer would reject, reported at once in its own words: a restart would not fix it
    [[ ! -f $HERE/config.py ]] || (cd "$HERE" && "$PY" -c 'import sys, cli, config
cli.run_cli(lambda: config.parse(sys.argv[1:], lambda path: {}))' "$@") || exit 1
    mkdir -p "$OUT" && exec 9>>"$OUT/train.lock" # inherited by all that follows: locked while any part of the run lives
    flock -n 9 || die "$OUT already has a run (processes: $(marked | tr '\n' ' ')): one run per folder. Stop it with:" \
        "kill \$(cat $OUT/train.pid), or give another --out-dir"
    log=$OUT/train-$(date +%Y%m%d-%H%M%S).log
    say "$0 $*" 2>/dev/null >>"$log"; [[ -s $log ]] || die "cannot write to $log: is the disk full?"
    TRAIN_SH_LOG=$log setsid nohup bash "${BASH_SOURCE[0]}" "$@" </dev/null >>"$log" 2>&1 &
    echo $! >"$OUT/train.pid"; exec 9>&-
    echo "started: $nproc process(es)$( ((gpus)) || echo ' on the CPU'), run folder $OUT, pid $!"
    echo "follow:  tail -f ${log@Q}"
    echo "stop:    kill \$(cat ${OUT@Q}/train.pid)    # it saves first; the same command resumes from there"
    ((${START_WAIT:-15} == 0)) || timeout "${START_WAIT:-15}" tail -n +1 -f --pid=$! "$log" || true
    kill -0 $! 2>/dev/null || wait $! || die "the run ended at once; see its log: $log"
    exit 0
fi

# ---- detached: run, restart, publish, leave ----
child='' stopping=0 failures=0 outcome='' limit='' saved=''
children() { grep -lsx "PPid:[[:space:]]*$1" /proc/[0-9]*/status | cut -d/ -f3; } # -s: one may have just ended
stop() { # the ranks save and exit 0 by themselves; torchrun would give them 30 seconds and report a failure
    say "asked to stop: the trainer saves and exits"
    local pids; stopping=1 pids=$(children "$child" 2>/dev/null || true)
    [[ -z $child ]] || xargs kill -TERM <<<"${pids:-$child}" || true
}
trap stop TERM INT; trap '' HUP
attend() { # run a command and return its exit status; meanwhile signals reach us and, through stop(), the command
    local status=0
    "$@" &
    child=$!
    ((!stopping)) || kill -TERM "$child" || true
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do status=0; wait "$child" || status=$?; done # a signal ends wait early
    child=''
    return $status
}
reap() { # a killed torchrun leaves its ranks on the GPUs: let them save, then kill what remains
    local i
    for i in TERM {1..60} KILL; do
        [[ -n $(marked) ]] || return 0
        [[ $i == [0-9]* ]] || { say "sending SIG$i to processes it left"; marked | xargs -r kill "-$i" || true; }
        sleep 1
    done
}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HERE/.cache} # a volume keeps compiled code, /tmp may not
cmd=("$PY" -m torch.distributed.run)
if [[ $PY == "$HERE/.venv/"* ]]; then [[ ! -x $HERE/.venv/bin/torchrun ]] || cmd=("$HERE/.venv/bin/torchrun")
elif command -v torchrun >/dev/null; then cmd=(torchrun); fi
cmd+=(--standalone "--nproc_per_node=$nproc" "$HERE/train_gpt2.py" "$@")
[[ -n $resume ]] || cmd+=(--resume auto)
[[ -z ${GPU_HOUR_USD:-} || -n $(flag gpu-hour-usd) ]] || cmd+=(--gpu-hour-usd "$GPU_HOUR_USD")
if [[ -n ${BUDGET_USD:-} ]]; then
    limit=$(awk -v b="$BUDGET_USD" -v p="$GPU_HOUR_USD" -v n="$nproc" 'BEGIN {printf "%d", b / (p * n) * 3600}')
    say "budget: $BUDGET_USD USD at $GPU_HOUR_USD per GPU-hour for $nproc GPU(s): $limit seconds, including restarts"
fi
publisher() { # alongside training: push what is new since the last push
    local newest last=''
    while sleep "$PUSH_EVERY" && kill -0 $$; do
        newest=$(weights | sort -V | tail -n 1)
        if [[ $newest != "$last" && -f ${newest/model_/optim_} ]]; then
            say "pushing ${newest##*/} to $PUSH_TO while training continues"
            if nice "$PY" "$HERE/hub.py" push-model "$OUT" "$PUSH_TO" --with-optimizer; then last=$newest
            else say "that push failed; next try in $PUSH_EVERY seconds"; fi
        fi
    done
}
weights() { compgen -G "$OUT/model_*.pt" || true; }
before=$(weights) publishing=''
[[ ${PUSH_EVERY:-0} == 0 ]] || { publisher & publishing=$!; }
while [[ -z $outcome ]]; do
    start=("${cmd[@]}") from=$(stat -c %s "$TRAIN_SH_LOG") status=0
    # a restart resumes from a checkpoint of this run; until there is one, the --resume that was given applies
    [[ -z $resume || $resume == auto || $(weights) == "$before" ]] || start+=(--resume "$OUT")
    [[ -z $limit ]] || start+=(--time-limit "$((limit > SECONDS ? limit - SECONDS : 1))")
    say "start $((failures + 1)): ${start[*]}"
    attend env TRAIN_RUN_DIR="$OUT" "${start[@]}" || status=$?
    reap
    if ((stopping)); then outcome=stopped
    elif ((status == 0)); then
        outcome=finished
        ! tail -c "+$((from + 1))" "$TRAIN_SH_LOG" | grep -q '^stopped by ' || outcome="ended early: see the line above"
    elif tail -c "+$((from + 1))" "$TRAIN_SH_LOG" | grep -q '^error: '; then outcome="failed: see the error above"
    elif ((failures++ >= ${MAX_RESTARTS:-3})); then outcome="failed: exit code $status, no restarts left"
    else
        say "exit code $status: restart $failures of ${MAX_RESTARTS:-3} in ${RESTART_DELAY:-10} seconds"
        attend sleep "${RESTART_DELAY:-10}" || ((!stopping)) || outcome=stopped
    fi
done
say "training $outcome"
[[ -z $publishing ]] || {
    xargs kill < <(echo "$publishing"; children "$publishing")
    wait "$publishing"
} 2>/dev/null || true

leave() { # publish, then give the machine back if that loses nothing
    if ((stopping)); then say "stopped on request: nothing is pushed, this machine stays"; return; fi
    local with=() # an unfinished run must be able to resume elsewhere
    [[ $outcome == finished ]] || ! compgen -G "$OUT/optim_*.pt" >/dev/null || with=(--with-optimizer)
    if [[ -z $(weights) ]]; then saved="there is no checkpoint to lose"
    elif [[ -z ${PUSH_TO:-} ]]; then [[ ${PERSISTENT:-0} != 1 ]] || saved="the weights are on persistent storage"
    else
        for try in 1 2 3; do
            say "push to $PUSH_TO, try $try of 3"
            attend "$PY" "$HERE/hub.py" push-model "$OUT" "$PUSH_TO" "${with[@]}" && saved="the weights are at $PUSH_TO" && break
            ((stopping || try == 3)) || attend sleep "${RESTART_DELAY:-10}" || true
            ((!stopping)) || break
        done
        say "${saved:-the push failed; to push by hand: $PY $HERE/hub.py push-model $OUT $PUSH_TO}"
    fi
    if [[ ${REMOVE_POD:-0} != 1 ]]; then say "this machine stays: REMOVE_POD is not 1"
    elif [[ -z $saved ]]; then say "this machine stays: it holds the only copy of the weights"
    elif [[ $outcome == failed* && ${KEEP_ON_FAILURE:-0} == 1 ]]; then say "this machine stays: KEEP_ON_FAILURE=1"
    else
        say "$saved: this machine will be removed in ${REMOVE_DELAY:-60} seconds; to keep it: kill $$"
        ((stopping)) || attend sleep "${REMOVE_DELAY:-60}" || true
        ((!stopping)) || { say "this machine stays: asked to stop"; return; }
        say "running: ${SHUTDOWN_CMD:-runpodctl pod delete $RUNPOD_POD_ID}"
        if [[ -n ${SHUTDOWN_CMD:-} ]]; then bash -c "$SHUTDOWN_CMD"
        else runpodctl pod delete "$RUNPOD_POD_ID" || runpodctl remove pod "$RUNPOD_POD_ID"; fi || # version 2, then 1
            say "THAT FAILED (exit code $?): this machine is still running and costing money; remove it by hand"
    fi
}
leave
rm -f "$OUT/train.pid"
[[ $outcome != failed* ]]
