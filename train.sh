#!/usr/bin/env bash
# Train in the background: the run survives logout, restarts after failures, and can give a rented machine back.
#
#   ./train.sh                                    # gpt2-124m on every GPU of this machine, into log/gpt2-124m
#   ./train.sh record8-124m --out-dir log/fast    # any arguments of train_gpt2.py, which has its own -h
#   ./train.sh model_19073.pt 2                   # continue that checkpoint's run until 2 epochs are done
#   ./train.sh stop log/gpt2-124m                 # save and stop the run of that folder
#   PUSH_TO=me/gpt2-124m REMOVE_POD=1 GPU_HOUR_USD=2.5 ./train.sh
#
# The same command starts a run and resumes it, from the newest checkpoint of its run folder. There, train.log has what
# is printed and decided, and status.json how the trainer ended. A --time-limit counts over all restarts. As the first
# process of a container, or in a batch job, it stays in the foreground. Settings are variables:
#
#   NPROC          processes; by default one per GPU, or one without GPUs
#   MAX_RESTARTS   restarts after failures (3), counted anew once the run has got on; none after an error of yours
#   GPU_HOUR_USD   the price of one GPU for an hour: the log says what the run and this machine cost
#   PUSH_TO        OWNER/NAME: at the end push the best checkpoint, and the newest with its optimizer state, to this
#                  private repository of the Hub, for at most an hour; your token is tried before the start
#   PUSH_PUBLIC    1: push to a repository that is public, or create a public one
#   PUSH_EVERY     push while it trains, too, every so many seconds; each push stays in the repository
#   REMOVE_POD     1: remove this machine at the end, if the weights are pushed, if PERSISTENT=1, or if there are none,
#                  but not after a mistake of yours in the first ten minutes; a minute before, the log announces it
#   PERSISTENT     1: the run folder outlives this machine, as on a network volume
#   SHUTDOWN_CMD   the command that removes this machine; by default, on RunPod: runpodctl pod delete $RUNPOD_POD_ID

set -u

: "${MAX_RESTARTS:=3}" "${GPU_HOUR_USD:=}" "${PUSH_TO:=}" "${PUSH_EVERY:=0}" "${REMOVE_POD:=0}" "${PERSISTENT:=0}"
public=()
[[ ${PUSH_PUBLIC-} != 1 ]] || public=(--public)
# Each RunPod pod has runpodctl; what follows || is the spelling of its version 1.
pod=${RUNPOD_POD_ID-}
: "${SHUTDOWN_CMD:=${pod:+runpodctl pod delete $pod || runpodctl remove pod $pod}}"

restart_delay_s=20  # before the first restart, twice as long before the second: a volume that is down may come back
show_log_s=15       # the start shows the log for so long
early_mistake_s=600 # after a mistake so soon the machine stays: its user is probably still there
push_retry_s=3600   # the push at the end is tried for so long
push_try_s=1800     # one try: a transfer may hang for ever (huggingface_hub issue 3871)
push_pause_s=60     # between two tries
remove_delay_s=60   # before the machine is removed

# Python: the steps of so many epochs of the run with that config.json.
count_steps='import json, sys; run = json.load(open(sys.argv[2]))
print(int(sys.argv[1]) * run["resolved_max_steps"] // run["epochs"])'

# Python: torchrun, which ends without a traceback of its own: the trainer has said what is wrong.
torchrun='import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try: main()
except (ChildFailedError, SignalException): sys.exit(1)'

here=$(dirname "$(readlink -f "$0")")
python=$here/.venv/bin/python
[[ -x $python ]] || python=python3

# bash reads all functions before it calls the last line: an update of this file changes no run.
main() {
    [[ " $* " != *' -h '* && " $* " != *' --help '* ]] || exec sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    [[ ${1-} != stop ]] || stop "${2-}"
    read_arguments "$@"
    if [[ -z ${IN_BACKGROUND-} ]]; then
        check
        # A container and a batch job end with their first process: there it stays in the foreground.
        [[ $$ == 1 || -n ${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-} ]] || start_in_background "$@"
    fi
    supervise
}

fail() { echo "error: $*" >&2; exit 1; }
log() { echo "$(date '+%F %T') train.sh: $*"; }

# Set args, those of the trainer, out, the run folder, and from, the folder that it resumes from.
read_arguments() {
    args=("$@")
    # A checkpoint stands for its run, which may be past it by now. A name alone is looked for below log/, too.
    if [[ ${1-} == *.pt && $1 != -* ]]; then
        local found=$1 folder steps
        [[ $1 == */* || -e $1 ]] || found=$(find log -name "$1")
        [[ -n $found && $found != *$'\n'* ]] || fail "give the path of $1; log/ has ${found:-none}"
        folder=$(dirname "$found")
        # An epoch is one of the run's own, whatever the data; --epochs records how many its steps are.
        if [[ ${2-} =~ ^[0-9]+$ ]]; then
            steps=$("$python" -c "$count_steps" "$2" "$folder/config.json" 2>/dev/null) ||
                fail "$folder/config.json, which has the steps of that run, cannot be read; say --max-steps instead of $2"
            set -- "$1" --epochs "$2" --max-steps "$steps" "${@:3}"
        fi
        args=(--resume "$folder" "${@:2}")
    fi

    # The last value of a flag counts, which may be spelled with underscores, with = or a space.
    local i value resume='' preset=${args[0]--}
    out=''
    for ((i = 0; i < ${#args[@]}; i++)); do
        value=${args[i + 1]-}
        [[ ${args[i]} != *=* ]] || value=${args[i]#*=}
        case ${args[i]%%=*} in
            --out[-_]dir) out=$value ;;
            --resume) resume=$value ;;
        esac
    done
    if [[ $resume =~ ^(|auto|none)$ ]]; then
        [[ $preset != -* ]] || preset=gpt2-124m
        : "${out:=log/$preset}"
        from=$out
    else
        [[ -d $resume ]] && from=$resume || from=$(dirname "$resume")
        [[ -n $out || -e $resume ]] || fail "there is no $resume"
        : "${out:=$from}"
    fi
    [[ -n $resume ]] || args+=(--resume auto)
    args+=(--out-dir "$out" ${GPU_HOUR_USD:+--gpu-hour-usd "$GPU_HOUR_USD"})
}

# Refuse what would fail hours later, and lock the run folder, as long as any process has descriptor 9 open.
check() {
    : "${NPROC:=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
    export NPROC
    [[ $PUSH_EVERY == 0 || -n $PUSH_TO ]] || fail "PUSH_EVERY needs PUSH_TO=OWNER/NAME"
    if [[ $REMOVE_POD == 1 ]]; then
        [[ -n $SHUTDOWN_CMD ]] || fail "REMOVE_POD=1 needs SHUTDOWN_CMD, the command that removes this machine"
        [[ -n $PUSH_TO || $PERSISTENT == 1 ]] || fail "REMOVE_POD=1 needs PUSH_TO, or PERSISTENT=1 for the weights"
    fi
    [[ -z $PUSH_TO ]] || "$python" "$here/hub.py" check "$PUSH_TO" "${public[@]}" || exit 1

    mkdir -p "$out" || exit 1
    [[ $PERSISTENT != 1 || ! $(df --output=fstype "$out") =~ overlay|tmpfs ]] ||
        fail "PERSISTENT=1, but $out is on this machine's own storage: put --out-dir on the volume"
    exec 9>>"$out/train.lock" || exit 1
    flock -n 9
    # Another exit code is that of a disk without locks, where the trainer's own lock must do.
    [[ $? != 1 ]] || fail "$out has a run, process $(cat "$out/train.lock"); to stop it: ./train.sh stop $out"
}

# Go on in a session of its own, without the terminal and its SIGHUP: this script again, which inherits the lock. The
# terminal shows what it logs at first.
start_in_background() {
    local log=$out/train.log pid lines
    : >>"$log"
    lines=$(wc -l <"$log")
    trap '' HUP
    IN_BACKGROUND=1 setsid bash "$here/train.sh" "$@" </dev/null >>"$log" 2>&1 &
    pid=$!
    exec 9>&-
    echo "started: $NPROC process(es), run folder $out, pid $pid; this terminal may be closed"
    printf 'follow:  tail -F %q\n' "$log"
    printf 'stop:    %q stop %q    # it saves; the same command resumes\n' "$here/train.sh" "$(realpath "$out")"
    timeout "$show_log_s" tail -f -s 0.2 --pid="$pid" -n +$((lines + 1)) "$log"
    kill -0 "$pid" 2>/dev/null || wait "$pid"
    exit
}

# stop FOLDER: the lock is held as long as its run lasts, and its file names the process.
stop() {
    local pid host
    if [[ ! -s $1/train.lock ]] || flock -n "$1/train.lock" true; then
        fail "'$1' has no run that train.sh has started; give its folder, as in ./train.sh stop log/gpt2-124m"
    fi
    read -r pid host <"$1/train.lock"
    [[ $host == "on $HOSTNAME" ]] || fail "its process is $pid $host: stop it there"
    kill "$pid" || exit
    printf 'process %s saves and stops: tail -F %q\n' "$pid" "$1/train.log"
    exit
}

supervise() {
    stopping=''      # whether a signal has come
    child=''         # the process that this one waits for
    early_mistake='' # whether training has ended so
    set -m           # each child gets a process group: Ctrl-C in a terminal comes here alone
    trap ask_to_stop TERM INT HUP USR1 USR2 XCPU # clusters announce the end of a job by one of these
    echo "$$ on $HOSTNAME" >"$out/train.lock"

    local costs pusher='' stays='this machine STAYS' end="${PUSH_TO:+push to $PUSH_TO, for at most an hour; }"
    costs=$(awk "BEGIN {printf \"%.2f\", $NPROC * ${GPU_HOUR_USD:-0}}")
    stays+="${GPU_HOUR_USD:+ and costs \$$costs an hour}${SHUTDOWN_CMD:+ until you run: $SHUTDOWN_CMD}"
    [[ $REMOVE_POD != 1 ]] || end+='this machine is removed if the weights are safe, else '
    log "at the end: $end$stays"

    push=("$python" "$here/hub.py" push-model "$out" "$PUSH_TO" "${public[@]}" --with-optimizer)
    if [[ $PUSH_EVERY != 0 ]]; then
        push_periodically >>"$out/push.log" 2>&1 9>&- &
        pusher=$!
    fi
    train
    log "training $outcome"
    [[ -z $pusher ]] || kill -- "-$pusher"
    [[ -z $stopping ]] && secure_weights && [[ $REMOVE_POD == 1 && -z $early_mistake ]] && remove_machine || log "$stays"
    [[ $outcome != failed* ]]
    exit
}

# A signal ends what is waited for. Another one changes nothing: ranks would take it as the order to die.
ask_to_stop() {
    [[ -z $stopping ]] || return
    stopping=1
    log "asked to stop"
    [[ -z $child ]] || kill "$child"
}

# Run a command that a signal ends: while bash waits for a command in the foreground, it hears no signal.
run() {
    local code
    "$@" 9>&- &
    child=$!
    [[ -z $stopping ]] || kill "$child"
    while true; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break # otherwise a signal has ended the wait
    done
    child=''
    return "$code"
}

# Run the trainer until it has finished, was stopped, has an error of the user's, or has failed too often.
train() {
    local first='' before own=() failures=0
    # The command names its first checkpoint. A run that continues another one does so once: until it has its own.
    [[ ! $from -ef $out ]] || first=$(newest_model)
    export TRAIN_STATUS_FILE=$out/status.json TRAIN_START_TIME
    TRAIN_START_TIME=$(date +%s) # from which --time-limit counts
    SECONDS=0                    # bash counts them from here on
    outcome=stopped
    while [[ -z $stopping ]]; do
        # A restart resumes from this run's own checkpoint, whatever the command names.
        before=$(newest_model)
        [[ $before == "$first" || -z $before ]] || own=(--resume "$out")
        rm -f "$TRAIN_STATUS_FILE"
        log "start $((failures + 1)): $NPROC process(es), train_gpt2.py ${args[*]} ${own[*]}"
        run_trainer "${args[@]}" "${own[@]}"
        [[ -z $stopping ]] || return

        # torchrun exits with 1 whatever has happened. The trainer writes that down (write_status in system/process.py).
        case $(cat "$TRAIN_STATUS_FILE" 2>/dev/null) in
            *'"status": "finished"'*) outcome=finished ;;
            *'"status": "stopped"'*) outcome='ended early' ;;
            *'"status": "user_error"'*)
                outcome='failed: an error that you must fix, see above'
                ((SECONDS > early_mistake_s)) || early_mistake=1
                ;;
        esac
        [[ $outcome == stopped ]] || return

        # A run that gets on may fail again and again, in the days that it takes.
        [[ $(newest_model) == "$before" ]] || failures=0
        failures=$((failures + 1))
        log "failure $failures; MAX_RESTARTS is $MAX_RESTARTS"
        ((failures <= MAX_RESTARTS)) || { outcome='failed, no restart' && return; }
        run sleep $((restart_delay_s * failures))
    done
}

# The newest checkpoint of the run. One is complete when its model_*.pt has got its name: optim_*.pt comes before.
newest_model() {
    find "$out/" -maxdepth 1 -name 'model_[0-9]*.pt' | sort -V | tail -n 1
}

# torchrun with its ranks. If this process is killed, it is asked to save and stop, too (--pdeathsig). Some clusters
# signal every process of a job: torchrun must outlive that, or its ranks would be left alone (--signals-to-handle).
# Where a machine's own name does not resolve, torchrun would wait for more than six minutes (--local-addr).
run_trainer() {
    # After a signal torchrun gives its ranks this many seconds to save, then kills them; its default is 30.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
    run setpriv --pdeathsig TERM "$python" -c "$torchrun" --standalone --nproc_per_node="$NPROC" \
        --local-addr=127.0.0.1 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU \
        "$here/train_gpt2.py" "$@"
}

# Push each new checkpoint while it trains. Ends with the supervisor.
push_periodically() {
    local newest pushed=''
    while sleep "$PUSH_EVERY" && kill -0 $$; do
        newest=$(newest_model)
        [[ -n $newest && $newest != "$pushed" ]] || continue
        timeout --foreground "$push_retry_s" nice "${push[@]}" && pushed=$newest
    done
}

# Succeed if nothing is lost with this machine.
secure_weights() {
    local weights deadline=$((SECONDS + push_retry_s))
    weights=$(find "$out/" -maxdepth 1 -name 'model_*.pt') || weights=unknown # the disk may be gone
    [[ -n $weights ]] || return 0
    while [[ -n $PUSH_TO && -z $stopping ]]; do
        log "push to $PUSH_TO"
        run timeout "$push_try_s" "${push[@]}" --steps best && return
        ((SECONDS < deadline)) || break
        run sleep "$push_pause_s"
    done
    [[ $PERSISTENT == 1 ]] && return
    log "the weights are on this machine alone; to push them: python hub.py push-model $out OWNER/NAME"
    return 1
}

# Run the command that ends the bill, unless somebody prevents it. Succeed if it does.
remove_machine() {
    for _ in 1 2 3 4 5; do
        log "in $remove_delay_s seconds this machine runs: $SHUTDOWN_CMD    # to prevent it: kill $$"
        run sleep "$remove_delay_s"
        [[ -z $stopping ]] || return
        bash -c "$SHUTDOWN_CMD" 9>&- && return
        log "that FAILED"
    done
    return 1
}

main "$@"
