#!/usr/bin/env bash
# From a Qwen3 folder of Hugging Face to a longer context: evaluate, train at rising lengths, evaluate again, export.
#   bash scripts/extend_context.sh HF_DIR DATA OUTPUT_DIR [flags of train.py]
#   bash scripts/extend_context.sh --rehearse OUTPUT_DIR [flags of train.py]      a small random Qwen3, made here: a minute on a CPU
# DATA was prepared with the model's tokenizer: python -m data.prepare --input FILES --output DATA --tokenizer HF_DIR
# Flags win over scripts/extend_context.toml; --short_fraction 0 if DATA has no documents that fit into the first length.
# SCHEDULE=32768:100,65536:200,131072:100   LENGTH:STEPS[:THETA] of each stage; the first length is the one that the model knows
# RANKS=8   processes, one per GPU      BATCHES=32   rows of each validation
# The exported folder is OUTPUT_DIR/hf. A killed run continues when the same command is given again.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
    sed -n 2,9p scripts/extend_context.sh | cut -c 3-
}
refuse() {
    echo "$1: bash scripts/extend_context.sh --help says what to give" >&2
    exit 2
}

small=
case ${1:-} in
    -h | --help) usage; exit ;;
    --rehearse) ;;
    -*) refuse "unknown option $1" ;;
esac
if [ "${1:-}" = --rehearse ]; then
    [ $# -ge 2 ] || refuse "OUTPUT_DIR is missing"
    small=1 out=$2 hf=$2/qwen3 data=$2/data
    shift 2
    SCHEDULE=${SCHEDULE:-64:120,128:20,256:10}
    set -- --short_fraction 0 --lr 3e-3 --warmup_steps 10 "$@"  # its documents are long
else
    [ $# -ge 3 ] || refuse "HF_DIR, DATA and OUTPUT_DIR are three words"
    hf=$1 data=$2 out=$3
    shift 3
fi
if [ ! "$small" ]; then
    [ -f "$hf/config.json" ] || { echo "$hf holds no config.json: name a folder with a Hugging Face Qwen3 model" >&2; exit 2; }
    [ -f "$data/manifest.json" ] || { echo "$data is no dataset: prepare one with python -m data.prepare --tokenizer $hf" >&2; exit 2; }
fi
schedule=${SCHEDULE:-32768:100,65536:200,131072:100}
short=${schedule%%:*}
last=${schedule##*,}
long=${last%%:*}

convert() {  # into the folder $1.part, to be renamed when it is whole; what a kill left there is dropped
    local folder=$1
    shift
    rm -rf "$folder.part"
    python -m scripts.convert_qwen3 "$@" --output "$folder.part"
}

if [ "$small" ]; then
    echo "== a small random Qwen3 that knows $short tokens"
    [ -d "$data" ] || python -m data.prepare --input longhaul data --output "$data" --vocab_size 600 --val_fraction 0.1 --workers 1
    [ -d "$hf" ] || {
        python train.py --data "$data" --output_dir "$out/random" --model_size tiny --vocab_size 640 --context_length "$short" --max_steps 1 \
            --model_overrides hidden_size=64 num_layers=2 num_heads=4 num_kv_heads=2 head_dim=16 ffn_size=96 init_std=0.1 \
            --lr 0 --eval_every 0 --dtype fp32 --device cpu
        convert "$hf" --checkpoint "$out/random"
        mv "$hf.part" "$hf"
    }
fi

evaluate() {  # the loss of checkpoint $2 at both lengths, once; $1 says when
    local length file
    for length in "$short" "$long"; do
        file=$out/evaluation-$1-$length.txt
        [ -s "$file" ] || {
            python -m scripts.evaluate --checkpoint "$2" --data "$data" --evals loss --context_length "$length" --batches "${BATCHES:-32}" > "$file.part"
            mv "$file.part" "$file"
        }
        cat "$file"
    done
}

echo "== before, at $short and $long tokens"
[ -d "$out/before" ] || {
    convert "$out/before" --input "$hf"
    mv "$out/before.part" "$out/before"
}
evaluate before "$out/before"

echo "== train: $schedule"
launch=(python)
[ "${RANKS:-1}" = 1 ] || launch=(torchrun --standalone --nproc_per_node="$RANKS")
"${launch[@]}" train.py --config scripts/extend_context.toml --init_from "$hf" --data "$data" --length_schedule "$schedule" \
    --output_dir "$out/run" "$@"

echo "== after, at $short and $long tokens"
evaluate after "$out/run"

echo "== export"
if [ ! -d "$out/hf" ]; then
    tokenizer=()
    if [ -f "$hf/tokenizer.json" ]; then
        tokenizer=(--tokenizer "$hf/tokenizer.json")  # whose chat template the data has not
    elif ! compgen -G "$out/run/tokenizer.*" > /dev/null; then
        tokenizer=(--tokenizer none)
    fi
    convert "$out/hf" --checkpoint "$out/run" "${tokenizer[@]}"
    mv "$out/hf.part" "$out/hf"
fi

echo
echo "validation loss, nats per token   before   after"
for length in "$short" "$long"; do
    figures=$(awk '$1 == "validation" && $2 == "loss" { print $3 }' "$out/evaluation-before-$length.txt" "$out/evaluation-after-$length.txt")
    # shellcheck disable=SC2086
    printf '  at %9s tokens             %s   %s\n' "$length" $figures
done
echo "the extended model is $out/hf"
