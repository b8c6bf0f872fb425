#!/usr/bin/env bash
# Train in the background: the run survives logout, restarts after failures, and can give a rented machine back.
#   ./train.sh                                    # gpt2-124m on every GPU of this machine, into log/gpt2-124m
#   ./train.sh speedrun-124m --out-dir log/fast   # any arguments of train_gpt2.py
#   ./train.sh model_19072.pt 2                   # continue that checkpoint's run until 2 epochs are done
#   ./train.sh stop log/gpt2-124m                 # save and stop the run of that folder
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 BUDGET_USD=30 GPU_HOUR_USD=2.5 ./train.sh
#
# The same command starts a run and resumes it, from the newest checkpoint of its folder (OUT). OUT/train-<time>.log has
# every decision, OUT/train.log is a link to the newest log, OUT/status.json says how the trainer ended.
#
# The settings are environment variables, here with their defaults:
NPROC=${NPROC:-}                        # number of processes; default: one per GPU, or one without GPUs
START_WAIT=${START_WAIT:-15}            # for so many seconds the start shows the log
MAX_RESTARTS=${MAX_RESTARTS:-3}         # restarts after failures; an error that you must fix is never restarted
RESTART_DELAY=${RESTART_DELAY:-10}      # seconds before a restart
GPU_HOUR_USD=${GPU_HOUR_USD:-}          # the price of one GPU for an hour
BUDGET_USD=${BUDGET_USD:-}              # save and stop training once the NPROC GPUs of this start have cost so much

# PUSH_TO=OWNER/NAME: push to this repository of the Hub at the end; your token is tried before the start. A run that is
# not finished (budget, time limit, failure) is pushed with its optimizer state, with which it resumes elsewhere.
PUSH_TO=${PUSH_TO:-}
PUSH=${PUSH:-newest}                    # which checkpoints: newest, best (the lowest val loss) or all
PUSH_OPTIMIZER=${PUSH_OPTIMIZER:-0}     # 1: push a finished run with its optimizer state, too
PUSH_PUBLIC=${PUSH_PUBLIC:-0}           # 1: the repository is public
PUSH_EVERY=${PUSH_EVERY:-0}             # push while it trains, too, every so many seconds; 0: never
PUSH_RETRY_HOURS=${PUSH_RETRY_HOURS:-1} # how long the last push is tried again, in addition to BUDGET_USD

# REMOVE_POD=1: remove this machine at the end, if the weights are pushed, if PERSISTENT=1, or if there are none. If
# they cannot be pushed, STOP_CMD stops it. After a mistake of yours in the first ten minutes it stays.
REMOVE_POD=${REMOVE_POD:-0}
PERSISTENT=${PERSISTENT:-0}             # 1: OUT outlives the machine, as on a network volume
SHUTDOWN_CMD=${SHUTDOWN_CMD:-}          # removes it; default: runpodctl pod delete $RUNPOD_POD_ID
STOP_CMD=${STOP_CMD:-}                  # keeps OUT; default, with OUT below /workspace: runpodctl pod stop
REMOVE_DELAY=${REMOVE_DELAY:-60}        # seconds before either command, in which `kill` prevents it
KEEP_ON_FAILURE=${KEEP_ON_FAILURE:-0}   # 1: keep the machine if training has failed
set -euo pipefail

# ---- helpers ----
die() { echo "error: $*" >&2; exit 1; }
log() { printf '%s train.sh: %s\n' "$(date '+%F %T')" "$*" || true; } # || true: a full disk must not end this script
compute() { awk "BEGIN {printf \"$1\", $2}"; }                         # compute %d "2.5 * 3600"
find_newest_weights() { { find "$OUT" -maxdepth 1 -name 'model_*.pt' || true; } | sort -V | tail -n 1; }

# Print how the trainer ended (write_status in system/cli.py), as in "stopped signal SIGTERM"; nothing if it crashed.
read_status() {
    local program='import json, sys; status = json.load(open(sys.argv[1])); print(status["status"], status["reason"])'
    "$PY" -I -c "$program" "$OUT/status.json" 2>/dev/null || true
}

# Print what this machine costs if it stays, unless it seems to be the user's own.
describe_cost() {
    local price="what your provider charges"
    [[ -n $SHUTDOWN_CMD || -n $GPU_HOUR_USD ]] || return 0
    [[ -z $GPU_HOUR_USD ]] || price="\$$(compute %.2f "$NPROC * $GPU_HOUR_USD") an hour"
    echo "; it costs $price until you remove it: ${SHUTDOWN_CMD:-on the page of your provider}"
}

# ---- in the foreground: refuse what would fail hours later, start the supervisor, show its log ----

check_settings() {
    local name
    for name in START_WAIT MAX_RESTARTS RESTART_DELAY PUSH_EVERY REMOVE_DELAY NPROC; do
        [[ ${!name:-1} =~ ^(0|[1-9][0-9]*)$ ]] || die "$name=${!name} must be a whole number"
    done
    for name in GPU_HOUR_USD BUDGET_USD PUSH_RETRY_HOURS; do
        [[ ${!name:-1} =~ ^[0-9]*\.?[0-9]+$ && ${!name:-1} =~ [1-9] ]] || die "$name=${!name} must be a positive number"
    done
    for name in PUSH_OPTIMIZER PUSH_PUBLIC REMOVE_POD PERSISTENT KEEP_ON_FAILURE; do
        [[ ${!name} == [01] ]] || die "$name=${!name} must be 0 or 1"
    done
    [[ $PUSH =~ ^(newest|best|all)$ ]] || die "PUSH=$PUSH must be newest, best or all"
    [[ -n $PUSH_TO || $PUSH$PUSH_OPTIMIZER$PUSH_PUBLIC$PUSH_EVERY == newest000 ]] ||
        die "PUSH, PUSH_OPTIMIZER, PUSH_PUBLIC and PUSH_EVERY need PUSH_TO=owner/name"
    [[ -z $BUDGET_USD || -n $GPU_HOUR_USD ]] || die "BUDGET_USD needs GPU_HOUR_USD, the price of one GPU for an hour"
    [[ $REMOVE_POD == 1 ]] || return 0
    [[ -n $PUSH_TO || $PERSISTENT == 1 ]] || die "REMOVE_POD=1 would remove the only copy: set PUSH_TO or PERSISTENT=1"
    [[ -n $SHUTDOWN_CMD ]] || die "REMOVE_POD=1 needs SHUTDOWN_CMD, or runpodctl and RUNPOD_POD_ID as on a RunPod pod"
}

# Does the disk of OUT outlive this machine? Of a RunPod pod's disks, /workspace alone outlives a stop.
check_disk() {
    local kind mounted_at
    read -r kind mounted_at < <(df --output=fstype,target "$OUT" | tail -n 1)
    [[ $REMOVE_POD$PERSISTENT != 11 || ! $kind =~ ^(overlay|tmpfs)$ ]] ||
        die "PERSISTENT=1, but $OUT is on this machine's own storage ($kind): put --out-dir on the volume"
    [[ -z ${RUNPOD_POD_ID:-} || $mounted_at != /workspace* ]] ||
        STOP_CMD=${STOP_CMD:-"runpodctl pod stop $RUNPOD_POD_ID || runpodctl stop pod $RUNPOD_POD_ID"}
}

launch() { # [PRESET] [--flag value ...], or CHECKPOINT.pt [EPOCHS] [--flag value ...]
    local found preset=() defaults=(--resume auto) plan gpus log_file at_end
    [[ ! " $* " =~ " "(-h|--help)" " ]] || exec "$PY" "$HERE/train_gpt2.py" "$@"
    check_settings

    # A checkpoint stands for its run, which may be past it by now. A file name alone is looked for under log/.
    if [[ ${1:-} == *.pt ]]; then
        found=("$1")
        [[ $1 == */* || -f $1 ]] || mapfile -t found < <(find log -name "$1" 2>/dev/null)
        ((${#found[@]} == 1)) || die "log/ has ${#found[@]} files named $1; give the path of one, as in log/RUN/$1"
        set -- --resume "$(realpath -m "${found[0]}/..")" "${@:2}"
        [[ ! ${3:-} =~ ^[0-9]+$ ]] || set -- "$1" "$2" --epochs "${@:3}"
    elif [[ ${1:--} != -* ]]; then
        preset=("$1"); shift # it must stay before all flags
    fi
    [[ -z $BUDGET_USD || " $*" != *" --time"[-_]limit* ]] || die "BUDGET_USD sets --time-limit: leave that flag out"
    [[ -z $GPU_HOUR_USD ]] || defaults+=(--gpu-hour-usd "$GPU_HOUR_USD")
    set -- "${preset[@]}" "${defaults[@]}" "$@"

    # The trainer judges its arguments, data and GPU, and prints the run folder and the number of processes.
    plan=$("$PY" "$HERE/train_gpt2.py" "$@" --check) || exit 1
    { read -r OUT && read -r gpus && [[ $gpus =~ ^[0-9]+$ ]]; } <<<"$plan" || die "train_gpt2.py says: $plan"
    NPROC=${NPROC:-$gpus}
    [[ -z $PUSH_TO ]] || "${HUB[@]}" check "$PUSH_TO" "${PUBLIC[@]}" || exit 1

    # One run per folder: whatever is started here inherits the lock (file descriptor 9). flock exits with 1 if somebody
    # holds it, and with another code on a file system without locks; there the trainer's own lock must do.
    mkdir -p "$OUT"
    exec 9>>"$OUT/train.lock"
    flock -n 9 || (($? > 1)) || die "$OUT already has a run; stop it with: ./train.sh stop $OUT"
    check_disk

    # The log begins with what will happen at the end. A train.log that is no link is the user's own.
    log_file=$OUT/train-$(date +%Y%m%d-%H%M%S).log
    [[ -e $OUT/train.log && ! -L $OUT/train.log ]] || ln -sfn "${log_file##*/}" "$OUT/train.log"
    at_end="this machine STAYS$(describe_cost)"
    [[ $REMOVE_POD == 0 ]] || at_end="this machine is removed if the weights are safe, else: ${STOP_CMD:-$at_end}"
    log "at the end: ${PUSH_TO:+push to $PUSH_TO, for at most $PUSH_RETRY_HOURS hours; }$at_end" >>"$log_file"

    # The supervisor is this script in a session of its own, which a logout does not end.
    export OUT NPROC SHUTDOWN_CMD STOP_CMD
    nohup setsid bash "${BASH_SOURCE[0]}" --supervise "$@" </dev/null >>"$log_file" 2>&1 &
    echo "started: $NPROC process(es), run folder $OUT, pid $!"
    printf 'follow:  tail -F %q\n' "$OUT/train.log"
    printf 'stop:    %q stop %q    # it saves; the same command resumes\n' "$HERE/train.sh" "$OUT"
    [[ $START_WAIT == 0 ]] || timeout "$START_WAIT" tail -n +1 -f -s 0.2 --pid=$! "$log_file" || true
    kill -0 $! 2>/dev/null || wait $! || die "the run has failed: see $log_file"
}

stop_run() { # OUT
    local pid
    OUT=$(realpath -m "${1:?give the run folder, as in ./train.sh stop log/gpt2-124m}")
    pid=$(cat "$OUT/train.pid" 2>/dev/null) || die "nothing runs in $OUT (status: $(read_status | grep -m 1 . || echo -))"
    # After a reboot, or on a volume that two machines share, the number may be that of another process.
    grep -qzsFx "OUT=$OUT" "/proc/$pid/environ" ||
        die "process $pid (of $OUT/train.pid) was killed, or it is on another machine: nothing was stopped"
    kill "$pid"
    echo "process $pid saves and stops: tail -F $OUT/train.log"
}

# ---- in the background: train, push, give the machine back ----
stop_requested=0 # whether SIGTERM or SIGINT has come
outcome=''       # how training ended: "finished", "stopped", "ended early: ..." or "failed: ..."

# End what runs. torchrun passes the signal on to its ranks, which save. A second one they take as the order to die.
ask_to_stop() {
    ((stop_requested == 0)) || return 0
    stop_requested=1
    log "asked to stop"
    jobs -pr | xargs -r kill || true
}

# Run a command in the background and wait, so that a signal is handled at once. Returns the command's exit code.
run() {
    "$@" &
    ((stop_requested == 0)) || kill $! # asked before it was started
    wait $!
}

# Run the trainer until it finishes, is stopped, has an error of the user's, or has failed too often. Sets outcome.
train() { # ARGUMENTS
    local first_weights seconds=31536000 left flags exit_code status failures=0
    first_weights=$(find_newest_weights)
    [[ -z $BUDGET_USD ]] || seconds=$(compute %d "$BUDGET_USD / ($NPROC * $GPU_HOUR_USD) * 3600")

    while [[ -z $outcome ]]; do
        # A restart resumes from this run's own checkpoint, whatever the command names, with what is left of the budget.
        flags=()
        [[ $(find_newest_weights) == "$first_weights" ]] || flags+=(--resume "$OUT")
        left=$((seconds > SECONDS ? seconds - SECONDS : 1))
        [[ -z $BUDGET_USD ]] || flags+=(--time-limit "$left")
        log "start $((failures + 1)): $NPROC process(es), train_gpt2.py $* ${flags[*]}"
        rm -f "$OUT/status.json" || true
        # A trainer that hangs does not see its time limit: half an hour later it is ended.
        run timeout --foreground -k 900 $((left + 1800)) env TRAIN_STATUS_FILE="$OUT/status.json" \
            "$PY" -m torch.distributed.run --standalone "--nproc_per_node=$NPROC" "$HERE/train_gpt2.py" \
            "$@" "${flags[@]}" && exit_code=0 || exit_code=$?
        while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal has ended `wait`: it still saves

        status=$(read_status)
        case $stop_requested-$status-$exit_code in
            1-*) outcome=stopped ;;
            0-finished* | 0--0) outcome=finished ;;
            0-stopped*) outcome="ended early: ${status#* }" ;;
            0-user_error*)
                outcome="failed: ${status#* }"
                ((SECONDS > 600)) || KEEP_ON_FAILURE=1 ;; # its user is at hand, and the tokens may be here alone
            *)
                failures=$((failures + 1))
                log "failure $failures, exit code $exit_code; MAX_RESTARTS is $MAX_RESTARTS"
                ((failures <= MAX_RESTARTS && SECONDS < seconds)) || outcome="failed: exit code $exit_code, no restart"
                run sleep "$RESTART_DELAY" || true ;;
        esac
    done
    log "training $outcome"
}

# Push each new complete checkpoint while training continues. The next one replaces it (--temporary).
push_periodically() {
    local pushed='' newest
    trap 'jobs -pr | xargs -r kill; exit' TERM
    while run sleep "$PUSH_EVERY" && kill -0 $$; do # $$ is the supervisor
        newest=$(find_newest_weights)
        [[ $newest != "$pushed" && -f $OUT/optim_${newest##*/model_} ]] || continue
        log "pushing ${newest##*/} to $PUSH_TO"
        ! run timeout 3600 nice "${PUSH_MODEL[@]}" --with-optimizer --temporary || pushed=$newest
    done
}

# Push at the end, until that succeeds or PUSH_RETRY_HOURS are over. A transfer may hang for ever (huggingface_hub issue
# 3871), so a try gets half of that time.
push_at_end() {
    local flags=(--steps "$PUSH") seconds deadline
    if [[ ($outcome != finished || $PUSH_OPTIMIZER == 1) && -n $(find "$OUT" -maxdepth 1 -name 'optim_*.pt') ]]; then
        flags+=(--with-optimizer)
    fi
    seconds=$(compute %d "$PUSH_RETRY_HOURS * 3600 + 1")
    deadline=$((SECONDS + seconds))
    until log "push to $PUSH_TO" && run timeout -k 30 $((seconds / 2 + 1)) "${PUSH_MODEL[@]}" "${flags[@]}"; do
        ((stop_requested == 0 && SECONDS < deadline)) || return 1
        log "that push failed; next try in a minute"
        run sleep 60 || true
    done
}

# After training: push the weights, then give the machine back if that loses nothing.
end_run() {
    local files safe='' command=''
    # Why nothing can be lost; empty if it can. A folder that cannot be listed may have weights.
    if files=$(ls "$OUT") && ! grep -q '^model_.*\.pt$' <<<"$files"; then
        safe="there are no weights to lose"
    elif ((stop_requested == 0)) && [[ -n $PUSH_TO ]] && push_at_end; then
        safe="the weights are at $PUSH_TO"
    elif [[ $PERSISTENT == 1 ]]; then
        safe="the weights are on persistent storage"
    fi
    log "${safe:-the weights are on this machine alone; to push them: ${PUSH_MODEL[*]}}"

    # The command that ends the bill, unless the user wants to keep the machine. STOP_CMD keeps its disk.
    if [[ $REMOVE_POD == 1 && ($outcome != failed* || $KEEP_ON_FAILURE == 0) ]] && ((stop_requested == 0)); then
        command=${safe:+$SHUTDOWN_CMD}
        command=${command:-$STOP_CMD}
    fi
    if [[ -n $command ]]; then
        for _ in {1..5}; do
            log "in $REMOVE_DELAY seconds this machine runs: $command    # to prevent it: kill $$"
            run sleep "$REMOVE_DELAY" || true
            ((stop_requested == 0)) && bash -c "$command" && return
        done
        log "that was prevented, or IT FAILED"
    fi
    log "this machine stays$(describe_cost)"
}

supervise() { # ARGUMENTS
    echo $$ >"$OUT/train.pid"
    trap ask_to_stop TERM INT
    PUSH_MODEL=("${HUB[@]}" push-model "$OUT" "${PUSH_TO:-OWNER/NAME}" "${PUBLIC[@]}")
    # Compiled code stays in the project's folder, which may be on a network volume: the next pod then has it, too.
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HERE/.cache}
    # After a signal torchrun gives its ranks this many seconds to save, then kills them; its default is 30.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    [[ $PUSH_EVERY == 0 ]] || { push_periodically 9>&- & } # it must not hold the lock
    train "$@"
    jobs -pr | xargs -r kill || true # the pusher
    end_run
    rm -f "$OUT/train.pid"
    [[ $outcome != failed* ]]
}

# ---- main ----
hash flock setsid realpath || die "on Linux install util-linux and coreutils; elsewhere run python train_gpt2.py itself"
HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# The project's Python or, where it was installed otherwise, that of the shell.
PY=$HERE/.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python || command -v python3) || die "no python on PATH; run: make install"
HUB=("$PY" "$HERE/hub.py") PUBLIC=()
[[ $PUSH_PUBLIC != 1 ]] || PUBLIC=(--public)

# Every RunPod pod has runpodctl. What follows || is the spelling of its version 1.
if [[ -n ${RUNPOD_POD_ID:-} ]] && hash runpodctl 2>/dev/null; then
    SHUTDOWN_CMD=${SHUTDOWN_CMD:-"runpodctl pod delete $RUNPOD_POD_ID || runpodctl remove pod $RUNPOD_POD_ID"}
fi

case ${1:-} in
    -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" ;;
    stop) stop_run "${@:2}" ;;
    --supervise) supervise "${@:2}" ;;
    *) launch "$@" ;;
esac
