#!/usr/bin/env bash
# Run every measurement, in calls of at most 9 minutes. All output also goes to OUT; a part that fails or runs out of
# time does not stop the rest.
#
#   TEXT='books-*.parquet' ROWS=hellaswag_val.jsonl PEERS=~/peers bench/all.sh bench/results-here
#   TEXT='books-*.parquet' bench/all.sh bench/results-here growth       # also: longer, head, tuning, resume, recipes
#
# TEXT   parquet files to tokenize and train on; ROWS: HellaSwag rows (python hellaswag.py downloads them)
# PEERS  folder with checkouts of build-nanogpt and nanoGPT (optional); PRESET: default gpt2-124m, quickstart on a CPU
#
# Parts run by default: shards train attention hellaswag generate checkpoint; with a GPU generate-1 generate-64, without
# tokens loader. On request, one call each on a GPU, in this order where time is short: recipes, resume, cuda-tests,
# growth (sizes), longer (contexts, recompute), head (losses, a profile), tuning. OUT/*.md has it all; the rest is large.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
: "${TEXT:?give parquet files, as in TEXT='books-*.parquet'}"
PY=.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python3)
OUT=$(realpath -m "${1:?give a folder for the results}")
DATA=$OUT/shards
mkdir -p "$OUT"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
wanted=" ${*:2} "
[[ $wanted != "  " ]] || wanted=" train attention hellaswag generate generate-1 generate-64 checkpoint "
[[ -n $gpu || -n ${*:2} ]] || wanted+="tokens loader "
PRESET=${PRESET:-$([[ -n $gpu ]] && echo gpt2-124m || echo quickstart)}

part() { # part NAME SECONDS COMMAND...: run it if it is wanted, within SECONDS
    local name=$1 limit=$2 left=$((540 - SECONDS)) status=0
    shift 2
    [[ $wanted == *" ${name%%:*} "* ]] || return 0
    ((limit <= left)) || limit=$((left > 0 ? left : 1))
    printf '\n## %s\n\n    %s\n\n' "$name" "$*"
    timeout -s INT -k 10 "$limit" "$@" 2>"$OUT/${name/:/-}.err" || status=$?
    ((status == 0)) || { echo "FAILED: exit code $status after at most $limit s:"; tail -n 5 "$OUT/${name/:/-}.err"; }
}
train() { # train NAME SECONDS PRESET [bench.train's flags]
    part "$1" "$2" "$PY" -m bench.train "$3" --data-dir "$DATA" --rounds 1 "${@:4}"
}
{
    echo "# $(date -u +%F), ${gpu:-no GPU}, $(nproc) cores, torch $($PY -c 'import torch; print(torch.__version__)')"
    [[ -f $DATA/manifest.json ]] || wanted+="shards "
    # shellcheck disable=SC2086  # TEXT is a list of patterns
    part shards 120 $PY fineweb.py --source $TEXT --out "$DATA" --shard-size 5000000
    train train 300 "$PRESET" --steps 8 ${PEERS:+--peers "$PEERS"} --only ours ${PEERS:+nanogpt-compiled build-nanogpt}
    part attention 60 $PY -m bench.attention $([[ -n $gpu ]] || echo --batch 2 --rounds 2 --repeats 1)
    part hellaswag 90 $PY -m bench.hellaswag --data "${ROWS:-}" --rounds 1 --limit $([[ -n $gpu ]] && echo 1000 || echo 32)
    part generate 150 $PY -m bench.generate --rounds 1
    for n in ${gpu:+1 64}; do
        part "generate-$n" 100 $PY -m bench.generate --rounds 2 --samples "$n" --only ours transformers "static cache"
    done
    part checkpoint 120 $PY -m bench.checkpoint --dir "$OUT" ${gpu:+--sequence-length 1024 --micro-batch-size 64}
    # shellcheck disable=SC2086
    part tokens 60 $PY -m bench.tokens $TEXT --rounds 1
    part loader 60 $PY -m bench.loader

    small=${gpu:+--total-batch-size=131072} # enough for timing; the full batch only adds micro-steps
    small=${small:---total-batch-size=4096}
    for size in 124m 350m 774m 1558m; do
        train growth:$size 200 gpt2-$size --steps 4 --only ours -- "$small" ${gpu:+--micro-batch-size=16} # auto compiles each it tries
    done
    for T in 2048 4096; do
        train longer:$T 120 "$PRESET" --steps 4 --only ours -- "$small" --sequence-length=$T --model.block-size=$T \
            ${gpu:+--micro-batch-size=$((16384 / T))} # as many tokens as growth's
    done
    train longer:recompute 200 "$PRESET" --steps 4 --only ours ours-recompute -- "$small" --micro-batch-size=$([[ -n $gpu ]] && echo 64 || echo 16)
    train head:profile 150 "$PRESET" --steps 4 --only ours --profile -- "$small"
    part head:ways 300 $PY -m bench.head --rounds 1 ${gpu:+--rows 65536 --width 768}
    part resume 500 $PY -m bench.resume "$PRESET" --data-dir "$DATA" --ways default deterministic ${gpu:+"dtype=float16 deterministic"} \
        -- "$small" --micro-batch-size=16
    train tuning:speedrun 150 speedrun-124m --steps 4 --only ours -- "$small"
    train tuning:bfloat16-weights 150 "$PRESET" --steps 4 --only ours -- "$small" --weights=bfloat16
    part tuning:coordinate-descent 240 env TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 "$PY" -m bench.train "$PRESET" \
        --data-dir "$DATA" --rounds 1 --steps 4 --only ours -- "$small"
    part cuda-tests 500 $PY -m pytest tests/test_cuda.py
    part recipes 530 $PY -m bench.recipes --data-dir "$DATA" --seeds 1 --share 0.4 --out "$OUT/recipes" \
        --recipes adamw speedrun record8 --report "$OUT/recipes" $([[ -n $gpu ]] && echo --size 124m --steps 480 || echo --steps 20)
} | tee "$OUT/$(tr -d ' ' <<<"all${*:2}").md"
