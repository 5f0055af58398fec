#!/usr/bin/env bash
# Proof that a model uses its context: small ones learn to find answers thousands of tokens back, and to read text
# better for what stood long before. No GPU, no download.
# Usage: bash scripts/long_context_proof.sh [OUTPUT_DIR]      A killed run continues when the same command is given again.
# PROOF=convert   another proof instead of these: sparse and indexed attention answer like the model of FAR that they
#                 start from. It may have the OUTPUT_DIR of the first, whose parts it does not repeat.
# SEEDS="0"   of the data, the weights and the order of the rows; "0 1 2": three proofs, one after the other
# A seed that misses a bar does not stop the others. At the end the script fails.
# The settings below are those of all seeds in OUTPUT_DIR; others need another OUTPUT_DIR:
# ITEMS=16    rows at each length and noise of the evaluations, each with four questions; at 32,768 tokens half as many
# SHORT, NEAR, MIDDLE, FAR, FARTHEST, SPARSE    LENGTH:STEPS:THETA,... of the runs below, which follow each other
# INDEXED=4096:100:1.6e5    LENGTH:STEPS:THETA of the warm-up of an indexer; everything learns in the last step
# LEARNED=1.0    nats: a run of SHORT compares keys if the mean loss of its last 20 steps is below
# TEXT=800, TEXT_BYTES=10000000    steps of the run on text, and the most bytes of the embedded corpus that it reads from
# OUTPUT_DIR/proof.json has the figures; OUTPUT_DIR/seed-0/standard, farthest-retrieval, sparse-retrieval and text-gain
# have those of each evaluation (eval.json) and its picture (heatmap.svg), and seconds.jsonl what each part took. Those of
# "convert" are in OUTPUT_DIR/seed-0/far-converted, sparse-converted and indexed-converted.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C  # a point in the seconds in every language
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '4,/^set/ { /^#/ s/..//p }' scripts/long_context_proof.sh
    exit
elif [[ $# -gt 1 || "${1:-}" == -* ]]; then
    echo "$* is no OUTPUT_DIR: bash scripts/long_context_proof.sh --help says what to give" >&2
    exit 2
fi
folder=${1:-runs/long-context-proof}
items=${ITEMS:-16}
seeds=${SEEDS:-0}

# The rotary base grows with the length: with the old base, almost nothing is found at four times the length.
short=${SHORT:-16:150:1e4,32:300:1e4}
near=${NEAR:-64:150:1e4,256:160:1e4,1024:160:1e4}
middle=${MIDDLE:-4096:120:4e4}
far=${FAR:-8192:32:8e4,16384:20:1.6e5}
farthest=${FARTHEST:-32768:2:3.2e5}
sparse=${SPARSE:-1024:15:1.6e5,2048:10:1.6e5,4096:5:1.6e5}
indexed=${INDEXED:-4096:100:1.6e5}
text=${TEXT:-800}
noises=multikey,multikey-values,multikey-keys,multikey-all,multikey-constant,newest
proof=${PROOF:-context}

settings() {  # NAME=VALUE of those that were given
    local name
    for name in ITEMS SHORT NEAR MIDDLE FAR FARTHEST SPARSE INDEXED LEARNED TEXT TEXT_BYTES; do
        [ -z "${!name:-}" ] || echo "$name=${!name}"
    done
}

part() {  # the command $2 ... is part $1 of a seed, and makes the folder $1; it is not repeated once it has ended
    local seconds=$out/seconds.jsonl
    local TIMEFORMAT="{\"ended\": \"$1\", \"wall\": %R, \"user\": %U, \"system\": %S}"
    if [ -d "$out/$1" ] && grep -qsF "{\"ended\": \"$1\"," "$seconds"; then return; fi

    echo "== seed $seed: $1"
    { time "${@:2}" 2>&3; } 3>&2 2>"$out/seconds.part"
    cat "$out/seconds.part" >>"$seconds"
}

dataset() {  # $1, by the command $2 ...; a dataset appears whole or not at all
    [ -d "$out/$1" ] || part "$1" "${@:2}" --output "$out/$1"
}

train() {  # run $1 on dataset $2 with the length schedule $3, and further flags
    part "$1" python train.py --output_dir "$out/$1" --data "$out/$2" --length_schedule "$3" --whole_documents \
        --schedule "${schedule:-constant}" --weight_decay 0 --adam beta2=0.98 --optimizer muon --dtype fp32 \
        --device cpu --eval_every 0 --save_every 1000 "${@:4}"
}

learned() {  # yes or no: the last 20 steps of run $1 have a loss that only comparing keys can reach
    python - "$out/$1/metrics.jsonl" "${LEARNED:-1.0}" <<'PYTHON'
import json
import sys

records = [json.loads(line) for line in open(sys.argv[1])]
losses = [record["loss"] for record in records if record.get("loss") is not None][-20:]
print("yes" if sum(losses) / len(losses) < float(sys.argv[2]) else "no")
PYTHON
}

evaluate() {  # run $1, into folder $2, by the given flags
    part "$2" python -m scripts.evaluate --checkpoint "$out/$1" --device cpu --output "$out/$2" "${@:3}"
}

retrieval() { evaluate "$1" "$2" --evals retrieval --tasks "$3" --lengths "$4" --items "$5"; }
rising() { printf '%s\n' "$@" | sort -nu | paste -sd, -; }  # lengths, each once
last() { local stage=${1##*,}; echo "${stage%%:*}"; }  # the longest length of a schedule

learn_to_retrieve() {  # a model answers from any place of its context; the file not-learned, if it does not
    dataset data-near python -m data.recall --seed "$seed" --lengths 16:4 32:8 64:16 256:32 1024:64
    dataset data-far python -m data.recall --seed "$seed" --tokens 1000000 --lengths 64:16 256:32 1024:64 2048:64 4096:64 8192:64 16384:64 32768:64

    # At 32 tokens the model suddenly begins to compare keys; with some first weights later than these steps.
    local attempt begun answer=no
    for attempt in 0 1 2; do
        begun=short-$attempt
        train "$begun" data-near "$short" --seed $((10 * seed + attempt)) --lr 3e-3 --warmup_steps 20 --batch_size 64 --vocab_size 385 --model_size tiny \
            --model_overrides hidden_size=128 num_layers=2 num_heads=2 num_kv_heads=2 head_dim=128 ffn_size=64 tie_embeddings=false init_std=0.09
        answer=$(learned "$begun")
        if [ "$answer" = yes ]; then break; fi
        echo "seed $seed: $begun does not compare keys yet"
    done
    rm -f "$out/not-learned"
    if [ "$answer" = no ]; then
        echo "none of 3 runs of SHORT compares keys" >"$out/not-learned"
        return
    fi

    # A row is a document as long as the row in three of four cases, and packed from shorter ones in the others.
    local later=(--long_fraction 0.75 --seed "$seed")
    train near data-near "$near" --init_from "$out/$begun" --batch_size 2 --lr 2e-3 --warmup_steps 10 "${later[@]}"
    train middle data-far "$middle" --init_from "$out/near" --lr 2e-3 --warmup_steps 10 "${later[@]}"
    schedule=cosine train far data-far "$far" --init_from "$out/middle" --lr 2e-3 --warmup_steps 10 "${later[@]}"
}

sparsely() {  # the same model with sparse attention
    # A question asks for two tokens, so the blocks of sparse attention are small; it selects 1,024 tokens, as by default.
    train sparse data-far "$sparse" --init_from "$out/far" --lr 1e-3 --warmup_steps 10 --long_fraction 0.75 --seed "$seed" \
        --attention_type nsa --blocks cmp_block=4 cmp_stride=2 sel_block=8 sel_count=128 sel_local=8
}

retrieve() {  # proof 1: the context reaches farther than the lengths that it was trained at most, and sparse attention finds answers
    learn_to_retrieve
    if [ -f "$out/not-learned" ]; then return; fi
    local later=(--long_fraction 0.75 --seed "$seed")
    train farthest data-far "$farthest" --init_from "$out/far" --lr 1e-3 --warmup_steps 2 "${later[@]}"
    retrieval farthest standard "$noises" "$(rising 1024 4096 "$(last "$far")")" "$items"
    sparsely
    retrieval farthest farthest-retrieval multikey-all "$(last "$farthest")" $(((items + 1) / 2))
    retrieval sparse sparse-retrieval multikey "$(rising 1024 4096 "$(last "$sparse")")" "$items"
}

convert() {  # sparse and indexed attention of 1,024 tokens answer as the model that they were made from
    learn_to_retrieve
    if [ -f "$out/not-learned" ]; then return; fi
    sparsely

    local steps=${indexed#*:}
    steps=${steps%%:*}
    schedule=cosine:0.01 train indexed data-far "$indexed" --init_from "$out/far" --lr 6e-2 --warmup_steps 4 \
        --long_fraction 0.75 --seed "$seed" --attention_type indexed --blocks count=16 --indexer_warmup $((steps - 1))

    local name
    for name in far sparse indexed; do
        retrieval $name $name-converted multikey "$(rising 4096 "$(last "$far")")" "$items"
    done
}

read_text() {  # proof 2: text of the embedded corpus is read better after 128 tokens than after 64
    dataset data-text python -m data.prepare --vocab_size 512 --max_bytes "${TEXT_BYTES:-10000000}" --val_fraction 0.15
    part text python train.py --output_dir "$out/text" --data "$out/data-text" --model_size tiny --vocab_size 512 --rope_theta 1e4 \
        --model_overrides hidden_size=128 num_layers=2 num_heads=2 num_kv_heads=2 head_dim=64 ffn_size=256 tie_embeddings=false \
        --context_length 256 --batch_size 8 --optimizer muon --lr 6e-3 --adam beta2=0.98 --weight_decay 0 --warmup_steps 50 \
        --schedule wsd:0.4 --max_steps "$text" --dtype fp32 --device cpu --eval_every 0 --save_every 1000 \
        --seed "$seed"
    evaluate text text-gain --evals gain --batches 300 --context_length 128
}

for seed in $seeds; do
    [[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || { echo "SEEDS=\"$seeds\": $seed is no seed: give whole numbers, such as SEEDS=\"0 1 2\"" >&2; exit 2; }
done
[[ $proof == context || $proof == convert ]] || { echo "PROOF=$proof is no proof: give PROOF=convert, or nothing" >&2; exit 2; }
mkdir -p "$folder"
if [ -f "$folder/settings" ] && [ "$(cat "$folder/settings")" != "$(settings)" ]; then
    echo "$folder has a proof with other settings ($(paste -sd ' ' "$folder/settings")): give these, or another OUTPUT_DIR" >&2
    exit 2
fi
settings >"$folder/settings"

for seed in $seeds; do
    out=$folder/seed-$seed
    mkdir -p "$out"
    if [ "$proof" = convert ]; then
        convert
    else
        retrieve
        read_text
    fi
done
# shellcheck disable=SC2086
python -m scripts.proof_figures --folder "$folder" --proof "$proof" --seeds $seeds
