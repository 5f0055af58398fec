#!/usr/bin/env bash
# From clone to a trained model: install, prepare the embedded corpus, train `tiny` on 2 processes, evaluate, generate.
# Usage: bash scripts/quickstart.sh [--long] [OUTPUT_DIR]      A killed run continues when the same command is given again.
# --long: sparse attention at a context of 131,072 tokens (or $CONTEXT), on documents that are as long, one process, 3 steps.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup requirements.txt
started=$(date +%s)
long= out=
for word in "$@"; do
    case $word in
        --long) long=1 ;;
        -*) echo "unknown option $word: known: --long" >&2; exit 2 ;;
        *) out=$word ;;
    esac
done
out=${out:-runs/quickstart${long:+-long}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

echo "== data: the embedded corpus (standard library, torch and numpy sources)"
python -m data.prepare

if [ "$long" ]; then
    echo "== train: the tiny preset with sparse attention at ${CONTEXT:=131072} tokens"
    python train.py --model_size tiny --attention_type nsa --context_length "$CONTEXT" --documents directory --max_steps 3 --lr 2e-3 \
        --warmup_steps 1 --schedule constant --eval_every 3 --eval_rows 1 --output_dir "$out"
    echo "done in $(( $(date +%s) - started )) s; losses: $out/metrics.jsonl; curves: tensorboard --logdir $out/tensorboard"
    exit
fi
ranks=$(python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')  # a rank per GPU; without one, 2 on the CPU
echo "== train: the tiny preset on $ranks process(es)"
torchrun --standalone --nproc_per_node="$ranks" train.py --model_size tiny --context_length 1024 --batch_size 2 \
    --max_steps 200 --lr 2e-3 --warmup_steps 20 --eval_every 100 --save_every 100 --output_dir "$out"

echo "== evaluate"
python -m scripts.evaluate --checkpoint "$out"

echo "== generate"
python -m scripts.generate --checkpoint "$out" --prompt "def main(" --max_new_tokens 60

echo
echo "done in $(( $(date +%s) - started )) s. What is where, and what next:"
echo "  curves      tensorboard --logdir $out/tensorboard     (numbers: $out/metrics.jsonl)"
echo "  checkpoint  $(ls -d "$out"/step-???????? | tail -n 1)"
echo "  generate    python -m scripts.generate --checkpoint $out --prompt 'import torch'"
echo "  your text   python -m data.prepare --input FILES_OR_FOLDERS --output mydata"
echo "              torchrun --nproc_per_node=2 train.py --data mydata --model_size tiny --output_dir runs/mine"
echo "  a big one   torchrun --nproc_per_node=2 train.py --context_length 131072 --gradient_checkpointing --plan"
