#!/usr/bin/env bash
# Measure a machine with an NVIDIA GPU, and print what to paste into an issue: `make gpu-report`, about half an hour.
# A part that fails is reported, and the next one runs. PRESETS, FLAGS and PYTHON may be set.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-.venv/bin/python}
PRESETS=${PRESETS:-gpt2-124m llmc-124m speedrun-124m}
read -ra FLAGS <<< "${FLAGS:-}"

part() {
    printf '\n## %s\n\n' "$*"
    "$@" 2>&1 || echo "FAILED with exit code $?"
}
mkdir -p log && exec > >(tee log/gpu-report.md)
part nvidia-smi
part git describe --always --dirty
[[ -d data/stdlib ]] || part "$PYTHON" fineweb.py --source stdlib --out data/stdlib
part "$PYTHON" -m pytest tests/test_cuda.py
for preset in $PRESETS; do
    part "$PYTHON" train_gpt2.py "$preset" --data-dir data/stdlib --dry-run "${FLAGS[@]}"
done
part "$PYTHON" train_gpt2.py quickstart --out-dir "log/gpu-$(date +%s)" "${FLAGS[@]}"
