#!/usr/bin/env bash
# Every measurement in one call of at most 9 minutes: text, training, attention, HellaSwag, generation, checkpoints,
# loader. What a part prints goes to OUT as well; one that fails or runs out of time does not stop the rest.
#
#   TEXT='books-*.parquet' ROWS=hellaswag_val.jsonl PEERS=~/peers bench/all.sh bench/results-here
#
# TEXT   parquet files to tokenize and train on; ROWS: HellaSwag rows (python hellaswag.py downloads them)
# PEERS  folder with checkouts of build-nanogpt and nanoGPT (optional); PRESET: default gpt2-124m, quickstart without GPU
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TEXT:?give parquet files, as in TEXT='books-*.parquet'}" "${ROWS:?give HellaSwag rows, as in ROWS=rows.jsonl}"
PY=.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python3)
OUT=$(realpath -m "${1:?give a folder for the results}")
DATA=$OUT/shards
mkdir -p "$OUT"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
PRESET=${PRESET:-$([[ -n $gpu ]] && echo gpt2-124m || echo quickstart)}

part() { # part NAME SECONDS COMMAND...: run it, show it, keep it
    local name=$1 limit=$2 left=$((540 - SECONDS)) status=0
    shift 2
    ((limit <= left)) || limit=$((left > 0 ? left : 1))
    printf '\n## %s\n\n    %s\n\n' "$name" "$*"
    timeout "$limit" "$@" 2>"$OUT/$name.err" || status=$?
    ((status == 0)) || echo "FAILED: exit code $status after at most $limit s, see $OUT/$name.err"
}
{
    echo "# $(date -u +%F), ${gpu:-no GPU}, $(nproc) cores, torch $($PY -c 'import torch; print(torch.__version__)')"
    # shellcheck disable=SC2086  # TEXT is a list of patterns
    part shards 120 $PY fineweb.py --source $TEXT --out "$DATA" --shard-size 20000000
    part train 300 $PY bench/train.py "$PRESET" --data-dir "$DATA" --rounds 1 --steps 8 ${PEERS:+--peers "$PEERS"} \
        --only ours ${PEERS:+nanogpt-compiled build-nanogpt}
    part attention 60 $PY bench/attention.py $([[ -n $gpu ]] || echo --batch 2 --rounds 2)
    part hellaswag 90 $PY bench/hellaswag.py --data "$ROWS" --rounds 1 --limit $([[ -n $gpu ]] && echo 1000 || echo 32)
    part generate 90 $PY bench/generate.py --rounds 1
    [[ -z $gpu ]] || part generate-64 60 $PY bench/generate.py --rounds 2 --samples 64 --no-loop
    part checkpoint 60 $PY bench/checkpoint.py
    # shellcheck disable=SC2086
    part tokens 60 $PY bench/tokens.py $TEXT --repeats 1
    part loader 30 $PY bench/loader.py "$DATA"
} | tee "$OUT/all.md"
