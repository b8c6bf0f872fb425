#!/usr/bin/env bash
# Measure a machine with an NVIDIA GPU, and print what to paste into an issue: `make gpu-report`, about half an hour.
# A part that fails is reported, and the next one runs. PRESETS, FLAGS and PYTHON may be set. Only the last part needs the
# network, for OpenAI's weights.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-.venv/bin/python}
PRESETS=${PRESETS:-gpt2-124m llmc-124m record8-124m}
read -ra FLAGS <<< "${FLAGS:-}"

part() {
    printf '\n## %s\n\n' "$*"
    "$@" 2>&1 || echo "FAILED with exit code $?"
}

# SIGTERM to torchrun while the ranks compile, ten seconds after they have made the run folder: they must save and end.
# torchrun would kill them after 30 seconds and hide that they hang.
stop_torchrun() {
    local folder=log/gpu-stop-$start
    TRAIN_STATUS_FILE=$folder.status.json TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 \
        "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=auto \
        train_gpt2.py "${PRESETS%% *}" --data-dir data/stdlib --out-dir "$folder" "${FLAGS[@]}" &
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
    cat "$folder.status.json" && grep -q '"stopped"' "$folder.status.json"
}

start=$(date +%s)
mkdir -p log && exec > >(tee log/gpu-report.md)
part nvidia-smi
part git describe --always --dirty
[[ -d data/stdlib ]] || part "$PYTHON" fineweb.py --source stdlib --out data/stdlib
part "$PYTHON" -m pytest tests/test_cuda.py
for preset in $PRESETS; do
    part "$PYTHON" train_gpt2.py "$preset" --data-dir data/stdlib --dry-run "${FLAGS[@]}"
done
part "$PYTHON" train_gpt2.py quickstart --data-dir data/stdlib --out-dir "log/gpu-$start" "${FLAGS[@]}"
part stop_torchrun
# float16 is what cards without bfloat16 take; OpenAI's weights have the large gradients that can overflow in it.
part "$PYTHON" train_gpt2.py finetune --data-dir data/stdlib --dtype float16 --max-steps 60 \
    --out-dir "log/gpu-float16-$start" "${FLAGS[@]}"
