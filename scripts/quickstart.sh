#!/usr/bin/env bash
# From clone to a trained model: install, prepare the embedded corpus, train a small model on 2 processes, evaluate, generate.
# Usage: bash scripts/quickstart.sh [--long] [OUTPUT_DIR]      A killed run continues when the same command is given again.
# STEPS=60 trains fewer steps than 240.
# --long: sparse attention at a context of 131,072 tokens (or $CONTEXT), on documents that are as long, one process, 3 steps.
set -euo pipefail
cd "$(dirname "$0")/.."
long= out=
for word in "$@"; do
    case $word in
        --long) long=1 ;;
        -h | --help) sed -n '2,5s/^# //p' scripts/quickstart.sh; exit ;;
        -*) echo "unknown option $word: known: --long" >&2; exit 2 ;;
        *) out=$word ;;
    esac
done
out=${out:-runs/quickstart${long:+-long}}
source scripts/setup.sh
setup requirements.txt
started=$(date +%s)

next_commands() {
    echo "What next, from this folder ($PWD):"
    echo "  first       source .venv/bin/activate     (once in every new shell)"
}

echo "== data: the embedded corpus (standard library, torch and numpy sources)"
python -m data.prepare

if [ "$long" ]; then
    echo "== train: the tiny preset with sparse attention at ${CONTEXT:=131072} tokens"
    python train.py --model_size tiny --attention_type nsa --context_length "$CONTEXT" --max_steps 3 --lr 2e-3 \
        --warmup_steps 1 --schedule constant --eval_every 3 --eval_rows 1 --output_dir "$out"
    echo "done in $(( $(date +%s) - started )) s; the losses are in $out/metrics.jsonl."
    next_commands
    echo "  curves      tensorboard --logdir $out/tensorboard     (then open http://localhost:6006; Ctrl-C ends it)"
    exit
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
ranks=$(python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')  # a rank per GPU; without one, 2 on the CPU
# Half the width of tiny, short rows and Muon: fewer bits per byte than the whole of it with AdamW, in less than half the CPU time.
echo "== train: the tiny preset at half its width on $ranks process(es)"
half=$(((${STEPS:=240} + 1) / 2))
torchrun --standalone --nproc_per_node="$ranks" train.py --model_size tiny --model_overrides hidden_size=128 num_heads=4 ffn_size=384 \
    --context_length 256 --batch_size 4 --max_steps "$STEPS" --optimizer muon --lr 1e-2 --warmup_steps 20 \
    --eval_every "$half" --save_every "$half" --output_dir "$out"

echo "== evaluate"
python -m scripts.evaluate --checkpoint "$out" --evals loss,position --batches 128

echo "== generate"
python -m scripts.generate --checkpoint "$out" --prompt "def main(" --max_new_tokens 60

echo
echo "done in $(( $(date +%s) - started )) s. The checkpoint is $(ls -d "$out"/step-???????? | tail -n 1), the numbers are in $out/metrics.jsonl."
next_commands
echo "  generate    python -m scripts.generate --checkpoint $out --prompt 'import torch'"
echo "  measure     python -m scripts.evaluate --checkpoint $out --output $out/evaluation     (context gain and retrieval, too)"
echo "  curves      tensorboard --logdir $out/tensorboard     (then open http://localhost:6006; Ctrl-C ends it)"
echo "  your text   python -m data.prepare --input README.md longhaul --output mydata     (or your own files and folders)"
echo "              torchrun --nproc_per_node=2 train.py --data mydata --model_size tiny --context_length 256 --max_steps 100 --warmup_steps 10 --output_dir runs/mine"
echo "  a big one   python profile_memory.py --model_size 4B --context_length 131072 --gradient_checkpointing     (predicts its memory; no GPU is needed)"
