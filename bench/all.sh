#!/usr/bin/env bash
# Run the measurements of bench/ and collect their tables in a folder. One call takes at most 9 minutes.
#
#   TEXT='books-*.parquet' ROWS=hellaswag_val.jsonl PEERS=~/peers bench/all.sh bench/results-here
#   TEXT='books-*.parquet' bench/all.sh bench/results-here growth       # only the parts that are named
#
# A part that fails or runs out of time does not stop the rest. Environment:
#   TEXT    parquet files to tokenize and to train on
#   ROWS    HellaSwag rows, as `python hellaswag.py` downloads them
#   PEERS   a folder with checkouts of build-nanogpt and nanoGPT, to measure them too (optional)
#   PRESET  what to train. Default: gpt2-124m with a GPU, quickstart without.
#
# Parts that run if none is named: shards train attention hellaswag generate checkpoint; with a GPU also generate-1 and
# generate-64; without one also tokens and loader. Parts that run only if named, on a GPU one call for each, and in this
# order if time is short: recipes, resume, cuda-tests, growth (model sizes), longer (contexts, recomputation), head
# (losses, and a profile), tuning. All tables end up in OUT/all*.md; the other files in OUT are large.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
: "${TEXT:?give parquet files, as in TEXT='books-*.parquet'}"
PY=.venv/bin/python
[[ -x $PY ]] || PY=$(command -v python3)
OUT=$(realpath -m "${1:?give a folder for the results}")
DATA=$OUT/shards
CALL_SECONDS=540
mkdir -p "$OUT"

# The parts to run. A name with a colon, such as growth:124m, belongs to the part before the colon.
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
wanted_parts=" ${*:2} "
if [[ $wanted_parts == "  " ]]; then
    wanted_parts=" train attention hellaswag generate generate-1 generate-64 checkpoint "
    [[ -n $gpu ]] || wanted_parts+="tokens loader "
fi
[[ -f $DATA/manifest.json ]] || wanted_parts+="shards "

# Sizes that depend on the machine: a CPU gets less work. For timing, a small batch is enough, as a full one only adds
# micro-steps. The micro-batch is fixed on a GPU, because `auto` would compile each size that it tries.
if [[ -n $gpu ]]; then
    PRESET=${PRESET:-gpt2-124m}
    attention_size=()
    hellaswag_rows=1000
    small_batch=--total-batch-size=131072
    growth_size=("$small_batch" --micro-batch-size=16)
    recompute_sequences=64
    head_size=(--rows 65536 --width 768)
    checkpoint_size=(--sequence-length 1024 --micro-batch-size 64)
    resume_ways=(default deterministic "dtype=float16 deterministic")
    recipe_size=(--size 124m --steps 480)
else
    PRESET=${PRESET:-quickstart}
    attention_size=(--batch 2 --rounds 2 --repeats 1)
    hellaswag_rows=32
    small_batch=--total-batch-size=4096
    growth_size=("$small_batch")
    recompute_sequences=16
    head_size=()
    checkpoint_size=()
    resume_ways=(default deterministic)
    recipe_size=(--steps 20)
fi

# run_part NAME SECONDS COMMAND...: run a part if it is wanted, for at most so many seconds and to the end of this call.
run_part() {
    local name=$1 time_limit=$2 seconds_left=$((CALL_SECONDS - SECONDS)) exit_code=0
    shift 2
    [[ $wanted_parts == *" ${name%%:*} "* ]] || return 0
    ((seconds_left > 0)) || seconds_left=1
    ((time_limit <= seconds_left)) || time_limit=$seconds_left
    local errors=$OUT/${name/:/-}.err
    printf '\n## %s\n\n    %s\n\n' "$name" "$*"
    timeout -s INT -k 10 "$time_limit" "$@" 2>"$errors" || exit_code=$?
    if ((exit_code != 0)); then
        echo "FAILED: exit code $exit_code after at most $time_limit s:"
        tail -n 5 "$errors"
    fi
}

# measure_training NAME SECONDS PRESET [flags of bench.train]: a part that measures the training step.
measure_training() {
    run_part "$1" "$2" "$PY" -m bench.train "$3" --data-dir "$DATA" --rounds 1 "${@:4}"
}

{
    echo "# $(date -u +%F), ${gpu:-no GPU}, $(nproc) cores, torch $("$PY" -c 'import torch; print(torch.__version__)')"

    # the parts that run by default
    # shellcheck disable=SC2086  # TEXT is a list of patterns, which the shell expands here
    run_part shards 120 "$PY" fineweb.py --source $TEXT --out "$DATA" --shard-size 5000000
    measure_training train 300 "$PRESET" --steps 8 ${PEERS:+--peers "$PEERS"} \
        --only ours ${PEERS:+nanogpt-compiled build-nanogpt}
    run_part attention 60 "$PY" -m bench.attention "${attention_size[@]}"
    run_part hellaswag 90 "$PY" -m bench.hellaswag --data "${ROWS:-}" --rounds 1 --limit "$hellaswag_rows"
    run_part generate 150 "$PY" -m bench.generate --rounds 1
    for samples in ${gpu:+1 64}; do
        run_part "generate-$samples" 100 "$PY" -m bench.generate --rounds 2 --samples "$samples" \
            --only ours transformers "static cache"
    done
    run_part checkpoint 120 "$PY" -m bench.checkpoint --dir "$OUT" "${checkpoint_size[@]}"
    # shellcheck disable=SC2086
    run_part tokens 60 "$PY" -m bench.tokens $TEXT --rounds 1
    run_part loader 60 "$PY" -m bench.loader

    # growth: model sizes
    for size in 124m 350m 774m 1558m; do
        measure_training "growth:$size" 200 "gpt2-$size" --steps 4 --only ours -- "${growth_size[@]}"
    done

    # longer: contexts, with as many tokens in a micro-batch as growth has; and a step with recomputation
    for context in 2048 4096; do
        measure_training "longer:$context" 120 "$PRESET" --steps 4 --only ours -- "$small_batch" \
            "--sequence-length=$context" "--model.block-size=$context" \
            ${gpu:+"--micro-batch-size=$((16384 / context))"}
    done
    measure_training longer:recompute 200 "$PRESET" --steps 4 --only ours ours-recompute -- \
        "$small_batch" "--micro-batch-size=$recompute_sequences"

    # head: where the time of a step goes; ways to compute the loss
    measure_training head:profile 150 "$PRESET" --steps 4 --only ours --profile -- "$small_batch"
    run_part head:ways 300 "$PY" -m bench.head --rounds 1 "${head_size[@]}"

    # resume: is a resumed run the same?
    run_part resume 500 "$PY" -m bench.resume "$PRESET" --data-dir "$DATA" --ways "${resume_ways[@]}" \
        -- "$small_batch" --micro-batch-size=16

    # tuning: other recipes and settings of the compiler
    measure_training tuning:speedrun 150 speedrun-124m --steps 4 --only ours -- "$small_batch"
    measure_training tuning:bfloat16-weights 150 "$PRESET" --steps 4 --only ours -- "$small_batch" --weights=bfloat16
    run_part tuning:coordinate-descent 240 env TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 \
        "$PY" -m bench.train "$PRESET" --data-dir "$DATA" --rounds 1 --steps 4 --only ours -- "$small_batch"

    run_part cuda-tests 500 "$PY" -m pytest tests/test_cuda.py
    run_part recipes 530 "$PY" -m bench.recipes --data-dir "$DATA" --seeds 1 --share 0.4 --out "$OUT/recipes" \
        --recipes adamw speedrun record8 --report "$OUT/recipes" "${recipe_size[@]}"
} | tee "$OUT/$(tr -d ' ' <<<"all${*:2}").md"
