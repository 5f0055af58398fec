"""Every door answers every bad input alike: one line with a remedy, an exit code that is not 0, no
traceback, within 15 seconds, without allocating 1 GiB, and without touching anything.

Doors run in this process. Rows are written as a user types them; {names} stand for files that the
fixtures make. What is wrong is the last flag of a row, which the answer names, or its value.
"""

import contextlib
import os
import re
import resource
import shlex
import shutil
import signal
import zipfile
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet as pq

import profile_memory
import train
import verify_chunked_loss
from base.flags import underscored
from benchmarks import attention, decoding, kernels, on_gpu, train_step, vocab_loss
from data import prepare, recall, report, sums
from footprint import __main__ as footprint_command
from lab import grade, intuitor, reward, run_full_analysis
from longhaul import qwen3
from scripts import convert_qwen3, equivalence, evaluate, generate, lm_eval, proof_figures
from tests.readers import evil_pickle
from tests.tiers import slow

SECONDS = 15
GIB = 2**30

TRAIN = (
    "--data {data} --model_size tiny --model_overrides num_layers=1 --vocab_size 600 "
    "--context_length 64 --max_steps 2 --warmup_steps 1 --eval_every 0 --device cpu --dtype fp32 "
    "--output_dir {new}"
)
PROFILE = "--model_size tiny --context_length 512"
GENERATE = "--checkpoint {run} --prompt x --device cpu"
EVALUATE = "--checkpoint {run} --device cpu"
POLICY = "--checkpoint {run} --data {data} --device cpu --output_dir {new}"
REWARD = "--checkpoint {run} --data {labels} --output {new} --device cpu"
ANALYSIS = "--checkpoint {run} --device cpu --out {new} --num_samples 1"

# What each door is given if a row says nothing else.
DOORS = {
    "train": (train.main, TRAIN),
    "continued": (train.main, "--init_from {run} --device cpu --output_dir {new}"),
    "profile": (profile_memory.main, PROFILE),
    "verify": (verify_chunked_loss.main, "--device cpu"),
    "generate": (generate.main, GENERATE),
    "ids": (generate.main, "--checkpoint {run} --device cpu"),
    "evaluate": (evaluate.main, EVALUATE),
    "analysis": (run_full_analysis.main, ANALYSIS),
    "convert": (convert_qwen3.main, ""),
    "prepare": (prepare.main, "--input {text} --output {new} --workers 1"),
    "embedded": (prepare.main, ""),
    "report": (report.main, "{data}"),
    "opened": (report.main, ""),
    "step": (profile_memory.main, ""),
    "footprint": (footprint_command.main, ""),
    "grade": (grade.main, f"{POLICY} --max_new_tokens 8"),
    "intuitor": (intuitor.main, f"{POLICY} --max_response_length 8"),
    "soft": (grade.main, ""),
    "policy": (intuitor.main, ""),
    "reward": (reward.main, REWARD),
    "harness": (lm_eval.main, "--checkpoint {run} --tasks x --device cpu"),
    "sums": (sums.main, "--output {new}"),
    "recall": (recall.main, "--output {new}"),
    "proof": (proof_figures.main, ""),
    "gpu": (on_gpu.main, "--rehearse --output {new}"),
    "losses": (vocab_loss.main, "--out {new}"),
    "kernels": (kernels.main, "--device cpu"),
    "decoding": (decoding.main, "--device cpu"),
    "steps": (train_step.main, "--device cpu"),
    "attention": (attention.main, ""),
    "equivalence": (equivalence.main, ""),
}

ROWS = """
train --lr abc
train --lr nan
train --lr 1e10
train --lr
train --lr=
train --lr 1e-3 --lr 1e-4
train --save_every 3 --save-every 3
train -lr 1
train --learning_rat 1
train --foo
train stray
train --weight_decay 1e30
train --adam eps=nan
train --adam eps=0
train --adam eps=inf
train --adam beta1=1
train --adam beta2=-0.5
train --adam beta3=0.5
train --grad_clip nan
train --schedule linear
train --schedule wsd:2
train --schedule wsd:0.2:0.1:0.3
train --schedule cosine:0.1:0.2
train --schedule constant:1
train --schedule cosine:
train --warmup_steps -1
train --max_steps 0
train --max_steps 99999999999999999999
train --max_steps 9000000000000000000
train --max_steps 1e3
train --seed 100000000000000000000000
train --seed x
train --context_length 0
train --context_length 1
train --context_length 1000000
train --context_length 99999999999999
train --context_length 10000000000000000000000
train --attention_type nsa --context_length 99999999999
train --batch_size 1000000
train --gradient_accumulation_steps 0
train --gradient_accumulation_steps 1000000
train --global_batch_size 3 --batch_size 2
train --context_length 4097 --context_parallel_size 2
train --context_length 4098 --context_parallel_size 2 --context_parallel_mode gather_kv
train --context_parallel_size 4 --context_parallel_mode ulysses
train --context_parallel_size 2 --context_parallel_mode gather_kv --attention_type nsa
train --context_parallel_size -1
train --context_parallel_size 2
train --output_dir {run} --context_length 32
train --output_dir {run} --model_overrides num_layers=2
train --output_dir {run} --rope_theta 5e5
train --max_steps 3 --output_dir {run} --lr 0.5
train --max_steps 9 --output_dir {run} --batch_size 3
train --output_dir {run} --length_schedule 32:1,64:1
train --output_dir {run} --whole_documents
train --max_steps 3 --output_dir {run} --resume {run}/step-00000001
train --resume {run}/step-00000001 --output_dir {other_run}
train --output_dir {no_record}
train --output_dir {torn_record}
train --output_dir {text}/run
train --resume {run}
train --init_from {hf} --model_size 4B
train --init_from {hf} --vocab_size 8192
train --init_from {hf} --model_overrides num_layers=5
train --init_from {hf_with_nan}
train --init_from {run_with_nan}
train --init_from {run} --data {other}
train --length_schedule 32:1,64:1 --max_steps 5
train --length_schedule 64:1,2048:1 --rope_scaling yarn:16:64
train --context_length 2 --whole_documents
train --config {blocks_true}
train --config {switch_with_value}
train --config {fraction}
train --config {no_device}
train --config {line_end}
train --config {twice_dashed}
continued
train --vocab_size -1
train --vocab_size 100
train --vocab_size 99999999999999
train --model_size 5B
train --model_size
train --model_overrides heads=3
train --model_overrides num_layers
train --model_overrides num_layers=0
train --model_overrides num_layers=x
train --model_overrides num_layers=1 num_layers=2
train --model_overrides num_kv_heads=3
train --model_overrides hidden_size=nan
train --model_overrides rope_theta=1
train --model_overrides compute_dtype=float16
train --model_overrides norm_eps=small
train --model_overrides tie_embeddings=maybe
train --model_overrides norm_eps=nan
train --attention_type dense
train --attention_type nsa --blocks window=0
train --attention_type nsa --blocks window=many
train --blocks windows=9
train --attention_type nsa --blocks cmp_stride=12
train --attention_type nsa --blocks cmp_kind=max
train --attention_type exact --blocks count=0
train --attention_type exact --blocks count=2
train --attention_type exact --blocks page=8
train --attention_type bounds --blocks page=24
train --attention_type pooled --blocks stride=24
train --attention_type pooled --blocks reduce=mean
train --attention_type exact --context_parallel_size 2 --context_parallel_mode gather_kv
train --attention_type indexed --blocks head_dim=7
train --attention_type indexed --blocks head_dim=12
train --attention_type indexed --blocks partial_rotary_factor=0.75
train --attention_type indexed --blocks partial_rotary_factor=1.5
train --attention_type indexed --blocks budget=64
train --attention_type indexed --compile
train --attention_type indexed --attention_head_groups 2
train --attention_type indexed --indexer_warmup 2
train --attention_type indexed --indexer_warmup 1 --grad_clip 0 --optimizer_in_backward
train --attention_type indexed --context_parallel_size 2 --context_parallel_mode ulysses
train --rope_theta nan
train --rope_scaling ntk
train --rope_scaling linear:0
train --rope_scaling yarn:4:0
train --rope_scaling yarn
train --init_from /nonexistent
train --init_from {folder}
train --data /nonexistent
train --data {text}
train --data {folder}
train --data {data}:0.5
train --data {data}:0.5,{data}:0.5
train --data {data}:0.5,/nonexistent:0.5
train --data {data}:0.5,{other}:0.5
train --data {data}:0.5,{other}:0.6
train --data {data}:half,{other}:0.5
train --data {data}:0.33333,{other}:0.66667
train --data {data},{other}
train --data {data}:1,{other}
train --data {data}:0,{other}:1
train --data {data}:-0.5,{other}:1.5
train --data /nonexistent.toml
train --data {no_shares}
train --length_schedule 64
train --length_schedule 64:1,
train --length_schedule 64:1,64:1
train --length_schedule 64:1:1e+e
train --length_schedule 64:2,32:2
train --length_schedule 64:2,96:2
train --length_schedule 64:0
train --length_schedule 1:5
train --length_schedule 32:2:1
train --length_schedule 32:1,64:4
train --length_schedule 32:1:1e4,64:1 --rope_theta 5e5
train --length_schedule 32:1,64:1 --rope_scaling yarn:2:16
train --length_schedule 32768:1,65536:1 --context_length 65536
train --length_schedule 32:1,64:1 --short_fraction 2
train --length_schedule 32:1,64:1 --short_fraction 0.5 --long_fraction 0.5
train --length_schedule 2:1,64:1 --short_fraction 0.5
train --long_fraction 1.5
train --long_fraction 0.33333
train --context_length 65536 --long_fraction 0.5
train --device gpu
train --device cuda
train --device cuda:0
train --dtype fp8
train --dtype fp16
train --gradient_checkpointing some
train --offload_activations
train --mlp_tiles -1
train --attention_head_groups 3
train --attention_head_groups 0
train --compile --mlp_tiles 2
train --compile --attention_head_groups 2
train --attention_head_groups 2 --gradient_checkpointing selective
train --compile --no_compile
train --master_weights none
train --master_weights host --optimizer muon
train --master_weights host --optimizer adamw_8bit
train --grad_clip 0 --optimizer muon --optimizer_in_backward
train --optimizer sgd
train --optimizer_in_backward
train --optimizer_in_backward --grad_clip 0 --gradient_accumulation_steps 2
train --loss fast
train --model_overrides logits_threshold_gib=nan
train --model_overrides loss_chunk_size=-1
train --dp_replicate 2
train --context_parallel_size 3
train --context_parallel_mode ring
train --max_skipped_steps -1
train --skip_rows 5
train --skip_rows 9:3
train --skip_rows a:b
train --skip_rows 5:5
train --skip_rows 1:2:3
train --skip_rows 1:
train --save_every 0
train --resume /nonexistent
train --resume {text}
train --resume {folder}
train --eval_every -1
train --eval_every 1 --evals retrieval --context_length 20
train --eval_every 1 --evals loss,gian
train --eval_every 1 --evals ,
train --fit yes
train --config /nonexistent.toml
train --config {folder}
train --config {twice}
train --config {unknown}
train --config {wrong_type}
train --config {huge}
train --config {torn}
train --config {latin}
train --output_dir {text}
train --output_dir {folder}
train --output_dir /proc/longhaul
train --output_dir {run} --seed 5
train --output_dir {run} --resume none
profile --context_length 0
profile --context_length 99999999999
profile --attention_type nsa --context_length 99999999999999
profile --solve levers --length_schedule 64:1,512:1
profile --length_schedule 64:1,256:1
profile --nproc 0
profile --nproc 3 --context_parallel_size 2
profile --gpu_memory_gib -1
profile --solve everything
profile --solve levers --gpu "RTX 9999"
profile --advise --gpu "RTX 9999"
profile --advise --nproc 2
profile --advise --vram -3
profile --advise --gpu H100 --cc 7
profile --advise --gpu "RTX 3060 Ty"
profile --task paint
profile --compile
profile --dtype fp16
profile --json /nonexistent/x.json
profile --html /nonexistent/x.html
profile --device cpu --measure --nproc 2
profile --snapshot x --device cpu
profile --batch-size 0
profile --contxt_length 5
profile --optimizer sgd
profile --task intuitor --group_size 1
profile --task intuitor --max_response_length 512
profile --task intuitor --max_new_tokens 3
profile --task intuitor --kl k2
profile --task intuitor --attention_type nsa
profile --task intuitor --max_response_length 9 --device cpu --batch_size 99999999
profile --task intuitor --max_response_length 9 --device cpu --solve levers
profile --task intuitor --max_response_length 9 --vram 8 --device cpu --advise
profile --task analysis --layers 4
profile --task analysis --vram 8 --solve levers
profile --task analysis --nproc 2
profile --task analysis --measure
profile --task analysis --html {new}
profile --task analysis --num_samples 0
profile --model_size 5B
profile --nproc 3 --dp_replicate 2
profile --measure
profile --advise
profile --gpus -1
verify --foo
verify --seq_len 0
verify --seq_len 1000000000000
verify --vocab_size 0
verify --vocab_size 99999999999999999999
verify --device gpu
verify --device cuda:99
verify --dtype int8
verify 5
generate --tokenizer {other_tokenizer}
generate --tokenizer {text}
generate --checkpoint {hf} --tokenizer {other_tokenizer}
generate --tokenizer /nonexistent
generate --temperature nan
generate --temperature 1e300
generate --temperature 1e-300
generate --top_k -1
generate --top_p 0
generate --top_p 2
generate --max_new_tokens 0
generate --device cuda:x
generate --device CPU
generate --max_new_tokens 100000000000
generate --seed 100000000000000000000000
generate --device gpu
generate --device cuda
generate --device cuda:7
generate --dtype int4
generate --checkpoint /nonexistent
generate --checkpoint {text}
generate --checkpoint {folder}
generate --promt y
generate --ids 1
ids --ids 600
ids --ids -1
ids --ids x
ids --ids
ids --ids 1 2 --tokenizer {other_tokenizer}
ids
analysis --layers 9
analysis --layers 0,0
analysis --num_samples 0
analysis --num_samples 100000
analysis --context_length 1
analysis --device cuda:99
analysis --dtype int8
analysis --compare float32
analysis --compare bf16,fp16
analysis --chunk -1
analysis --chunk 100
analysis --layers ,
analysis --layers 0,two
analysis --compare fp32,bf16,bfloat16
analysis --compare float32,int8
analysis --compare fp32,bf16 --dtype bf16
analysis --sae_k 1000000
analysis --out {text}
analysis --context_length 1000000
analysis --out {data}
evaluate --batches 0
evaluate --context_length 1
evaluate --context_length 1000000000
evaluate --device gpu
evaluate --device cuda
evaluate --checkpoint /nonexistent
evaluate --checkpoint {folder}
evaluate --data /nonexistent
evaluate --data {text}
evaluate --data {other}
evaluate --evals
evaluate --evals los
evaluate --evals ,
evaluate --evals gain --context_length 7
evaluate --evals retrieval --lengths 8
evaluate --evals loss --lengths 64
evaluate --evals loss --tasks single
evaluate --lengths 8
evaluate --lengths 0
evaluate --lengths 64,x
evaluate --lengths 999999999
evaluate --tasks singel
evaluate --items 0
evaluate --attention_type nsa
evaluate --blocks count=2
evaluate --attention_type exact --blocks size=2
evaluate --chunk -1
evaluate --dtype int8
evaluate --output {text}
evaluate --output {text}/below
evaluate --against /nonexistent
evaluate --against {folder}
evaluate --against {other_run}
evaluate --checkpoint {hf}
evaluate --checkpoint {hf} --data {other}
convert --output {new}
convert --output {new} --input /nonexistent
convert --output {new} --input {folder}
convert --output {new} --checkpoint /nonexistent
convert --checkpoint {run} --output {folder}
convert --output {new} --checkpoint {run} --input {folder}
convert --checkpoint {run} --output {new} --dtype int8
prepare --vocab_size 0
prepare --vocab_size 10
prepare --vocab_size 99999999
prepare --val_fraction 2
prepare --workers 0
prepare --character_coverage 7
prepare --input /nonexistent
prepare --input {empty}
prepare --input {latin}
prepare --input {broken_jsonl}
prepare --input {good_jsonl} --text_field body
prepare --input {torn_gz}
prepare --output {folder}
prepare --output {text}
prepare --tokenizer {text}
prepare --tokenizer /nonexistent
prepare --tokenizer {folder}
prepare --tokenizer {slow_tokenizer}
prepare --tokenizer {asks_for_code}
prepare --tokenizer {not_a_tokenizer}
prepare --tokenizer {other_tokenizer} --eod x
prepare --eod x
prepare --input {no_column}
prepare --input {torn_parquet}
prepare --input {torn_zst}
prepare --input {folder}/*.nothing
prepare --input memory://nowhere
prepare --input {good_jsonl} --text_field text.x
prepare --encoding utf-16
prepare --max_document_mib 0
prepare --max_document_mib x
prepare --documents lines
prepare --on_error ignore
prepare --max_bytes 5
prepare --inptu x
prepare --input {text} --input {text}
prepare --input {text} --answer_field answer
prepare --input {good_jsonl} --answer_field=
prepare --input {good_jsonl} --answer_field answer --documents directory
prepare --ouput=x
prepare --vocab_size many
prepare --tokenizer {other_tokenizer} --vocab_size 300
prepare --tokenizer {other_tokenizer} --character_coverage 0.9
prepare --output {text}/below
prepare --output /proc/longhaul
prepare --tokenizer {pickle}
prepare --tokenizer {zipped_pickle}
prepare --input {pipe}
prepare --input /dev/zero
prepare --output {link}
prepare --output {linked}
embedded --zzz
embedded --answer_field answer
embedded --input {text}
embedded --character_coverage 0.9
embedded --output {new} --on_error skip
embedded --tokenizer {other_tokenizer}
embedded --text_field body
embedded --vocab_size 0
embedded --max_bytes -1
report {folder}
report --pgn x
equivalence --what nothing
equivalence --steps 0
train --blocks sel_count=3
train --blocks count=8
train --attention_type indexed --blocks sel_count=3
train --attention_type nsa --blocks count=8
train --data {torn_data}
train --init_from {torn_run}
train --init_from {torn_hf}
train --resume {torn_run}/step-00000002
train --data {pickle}
train --resume {zipped_pickle}
train --init_from {pickle}
train --init_from {zipped_pickle}
train --init_from {distributed}
train --init_from {pickled_hf}
train --data {other_tokens}
train --max_steps 3 --output_dir {run} --data {other}
profile --blocks sel_count=3
profile --blocks count=8
profile --gpus 4
profile --gpu H100 --device cpu
profile --gpu H100 --vram 80
profile --gpu H1000
profile --gpu
profile --json {folder}
profile --json --solve levers
profile --json /dev/full
step --step /nonexistent.py
step --step {text}
step --hf {folder}
step --hf /nonexistent
step --hf {torn_hf}
step --hf {hf} --step x.py
step --hf {hf} --seq 0
step --hf {hf} --json {folder}
step --hf {hf} --json /dev/full
step --hf {hf} --svg /nonexistent/x.svg
step --step {program}
step --step {step} --seq 8
step --step {step} --solve context
step --step {step} --dtype bf16
step --step {step} --vram 8 --advise
step --step {step} --fsdp 2
step --step {step} --svg {folder}
step --step {step} --depth 0
step --hf {hf} --advise
step --hf {hf} --advise --device cpu
step --hf {hf} --advise --solve batch
step --hf {hf} --gpus 2
step --hf {hf} --cc 86
step --hf {hf} --gpu H100 --device cpu
step --hf {hf} --answer x=3
step --hf {hf} --answer "x.py:3=y z"
step --hf {hf} --fsdp 0
footprint --hf {hf} --batch 0
footprint --hf {hf} --lengths 9
footprint --step {text}
footprint --nproc x {step}
footprint --lengths {program} {step}
footprint --lengths 0 {step}
footprint --lengths {hf} {step}
generate --checkpoint {torn_run}
generate --checkpoint {zipped_pickle}
evaluate --checkpoint {distributed}
convert --output {new} --input {pickle}
convert --output {new} --input {pickled_hf}
evaluate --checkpoint {torn_run}
evaluate --data {torn_data}
analysis --checkpoint {torn_run}
convert --output {new} --checkpoint {torn_run}
convert --output {new} --input {torn_hf}
convert --input {hf} --output {new} --tokenizer none
opened {torn_data}
grade --checkpoint {folder}
grade --method gumble
grade --blocks sel_count=3
grade --max_new_tokens 0
grade --max_new_tokens 64
grade --gumbel_topk 100000
grade --method all --gumbel_topk -1
grade --tau_start 0
grade --tau_end nan
grade --kl_coef -0.1
grade --attention_type nsa
grade --reward_checkpoint {run}
grade --evals loss
soft --demo --method all --gumbel_topk 105
soft --demo --context_length 30
policy --checkpoint {run}
policy --data {data}
policy --demo --group_size 1
policy --memory_table --batch 12
policy --memory_table --tokens 4k
policy --memory_table --tokens 4
policy --memory_table --model Qwen9
policy --memory_table --x
intuitor --group_size 1
intuitor --max_response_length 64
intuitor --temperature 0
intuitor --temperature nan
intuitor --clip 0
intuitor --kl_coef -1
intuitor --normalizer rows
intuitor --length_schedule 8:1,16:1
intuitor --attention_type nsa
intuitor --vocab_size 16
intuitor --reward label
intuitor --checkpoint /nonexistent
intuitor --data {text}
intuitor --reward curiosity
intuitor --reward {text}:length
intuitor --reward /nonexistent.py:length
reward --checkpoint {folder}
reward --checkpoint {torn_run}
reward --data {text}
reward --data /nonexistent
reward --output {folder}
reward --steps -1
reward --lr 1e38
reward --lr 100 --weight_decay 100 --steps 60
reward --label_field one
reward --text_field words.all
reward --output {text}/out
reward --output /proc/nope
reward --held_out 1
harness --limit -1
harness --batch_size -1
harness --include_path /nonexistent
harness --output /
harness --dtype int8
reward --dtype fp16
harness --task x
sums --output {folder}
sums --worked 2
sums --seed -1
sums --val_fraction 1
recall --lengths 16
recall --lengths 16:7
recall --lengths 999:65
recall --lengths 16:2 16:3
recall --length 16:2
recall --tokens 15
recall --tokens 2000 --lengths 16:4 --val_fraction 1
recall --periodic 1.5
recall --seed -1
recall --output {folder}
recall --tokens -1
proof --folder {folder}
proof --folder /nonexistent
proof --folder {folder} --proof convert
proof --folder {folder} --seeds x
gpu --output {text}
gpu --rehaerse
losses --cases 512
losses --device gpu
attention --dtypes fp8
attention --tokens many
attention --device gpu
steps --device gpu
steps --sizes 31M
kernels --device cpu
kernels no_kernel
decoding --model_size 5B
decoding --device gpu
decoding --context_length 0
""".strip().splitlines()

# Where what is wrong is not what was given: something is missing, or the disk is full.
NAMELESS = {
    "continued",
    "ids",
    "convert --output {new}",
    "kernels --device cpu",
    "profile --json /dev/full",
    "step --hf {hf} --json /dev/full",
    "profile --advise",
    "step --hf {hf} --advise",
    "policy --checkpoint {run}",
    "policy --data {data}",
    "intuitor --reward label",
}
# Each plans a run for several seconds, as `train --batch_size 1000000` does.
SLOW = {
    "train --context_length 1000000",
    "train --length_schedule 32768:1,65536:1 --context_length 65536",
}
# What to do stands behind the last ": ".
REMEDY = re.compile(
    r".*: (give|use|choose|drop|name|keep|run|prepare|did you mean|add|repair|wait|make|check|"
    r"leave|change|take|free|see|mend|restore|convert to|remove|define|call|every value follows|"
    r"--help lists|allowed (is|are)) .*"
)
NEEDS_NO_GPU = re.compile(r"--device cuda( |$)")


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, Path]:
    """The files that rows name."""
    folder = tmp_path_factory.mktemp("bad")
    made = {name: folder / name for name in ("data", "other", "run", "folder", "text")}
    texts = "--input longhaul data --val_fraction 0.2 --workers 1 --vocab_size"
    assert prepare.main([*texts.split(), "600", "--output", str(made["data"])]) == 0
    assert prepare.main([*texts.split(), "500", "--output", str(made["other"])]) == 0
    made["other_tokenizer"] = made["other"] / "tokenizer.model"

    made["new"] = made["run"]
    train.main([*shlex.split(TRAIN.format(**made)), "--save_every", "1"])
    other = {**made, "new": folder / "other_run", "data": made["other"]}
    train.main(shlex.split(TRAIN.replace("600", "500").format(**other)))
    made["other_run"] = other["new"]
    convert_qwen3.main(["--checkpoint", str(made["run"]), "--output", str(folder / "hf")])
    made["hf"] = folder / "hf"
    made["new"] = folder / "new"

    made["torn_run"] = Path(shutil.copytree(made["run"], folder / "torn_run"))
    for weights in made["torn_run"].rglob("*.safetensors"):
        os.truncate(weights, weights.stat().st_size // 2)
    made["torn_hf"] = Path(shutil.copytree(made["hf"], folder / "torn_hf"))
    (made["torn_hf"] / "config.json").write_text('{"model_type": "qwen3", "hid')
    made["torn_data"] = Path(shutil.copytree(made["data"], folder / "torn_data"))
    for shard in made["torn_data"].rglob("*.bin"):
        os.truncate(shard, shard.stat().st_size // 2)

    make_broken_runs(folder, made)
    make_pickles(folder, made)
    made["other_tokens"] = Path(shutil.copytree(made["data"], folder / "other_tokens"))
    shutil.copy(made["other_tokenizer"], made["other_tokens"])

    made["folder"].mkdir()
    (made["folder"] / "notes.txt").write_text("notes")
    contents = dict(
        text="some text\n" * 50,
        empty="",
        latin="caf\xe9".encode("latin-1"),
        broken_jsonl='{"text": "a"}\n{"text": \n',
        good_jsonl='{"text": "a"}\n',
        not_a_tokenizer='{"model": 3}',
        torn_parquet=b"PAR1",
        torn_zst=b"\x28\xb5\x2f\xfd",
        torn_gz=b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03K",
        twice="lr = 1e-3\nlearning_rate = 1e-4\n",
        unknown="contxt_length = 3\n",
        no_shares="[corpora]\n",
        wrong_type="lr = true\n",
        huge="seed = 99999999999999999999\n",
        torn="lr = ",
        blocks_true="blocks = true\n",
        switch_with_value="compile = 1\n",
        fraction="seed = 1.5\n",
        no_device="device = 'tpu'\n",
        line_end='"lr\\nx" = 1\n',
        twice_dashed="[a]\nsave_every = 3\n[b]\nsave-every = 4\n",
        program="lr = 1e-3\n",
        step="import torch\ndef build(): return torch.nn.Linear(8, 8)\ndef step(model): ...\n",
        labels='{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n' * 20,
    )
    endings = dict(
        broken_jsonl=".jsonl",
        good_jsonl=".jsonl",
        not_a_tokenizer=".json",
        torn_parquet=".parquet",
        torn_zst=".txt.zst",
        torn_gz=".txt.gz",
        no_shares=".toml",
        program=".py",
        step=".py",
        labels=".jsonl",
    )
    for name, content in contents.items():
        path = folder / f"{name}{endings.get(name, '')}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        made[name] = path
    made["no_column"] = folder / "no_column.parquet"
    pq.write_table(pyarrow.table(dict(body=["a"])), made["no_column"])
    made["slow_tokenizer"] = folder / "slow"
    made["asks_for_code"] = folder / "code"
    made["slow_tokenizer"].mkdir()
    made["asks_for_code"].mkdir()
    (folder / "slow" / "vocab.json").write_text("{}")
    (folder / "code" / "tokenizer_config.json").write_text('{"auto_map": {"A": ["b.C", null]}}')
    return made


def make_broken_runs(folder: Path, made: dict[str, Path]):
    """Runs without their record or with half of it, and weights that are no numbers."""
    made["no_record"] = Path(shutil.copytree(made["run"], folder / "no_record"))
    (made["no_record"] / "run.json").unlink()
    made["torn_record"] = folder / "torn_record"
    made["torn_record"].mkdir()
    (made["torn_record"] / "run.json").write_text("")

    made["hf_with_nan"] = folder / "hf_with_nan"
    made["run_with_nan"] = folder / "run_with_nan"
    model = qwen3.from_hf(made["hf"])
    model.layers[0].mlp.up_proj.weight.data[-1, -1] = torch.nan
    qwen3.to_hf(model, made["hf_with_nan"])
    words = ["--input", str(made["hf_with_nan"]), "--output", str(made["run_with_nan"])]
    convert_qwen3.main(words)


def make_pickles(folder: Path, made: dict[str, Path]):
    """Pickles by their name and by their content, and ways that lead elsewhere. Whatever opens one
    makes a file, which is found.
    """
    evil = evil_pickle(folder / "mark")
    made["pickle"] = folder / "model.pt"
    made["pickle"].write_bytes(evil)
    made["zipped_pickle"] = folder / "archive.bin"
    with zipfile.ZipFile(made["zipped_pickle"], "w") as file:
        file.writestr("archive/data.pkl", evil)
    made["distributed"] = folder / "distributed"
    made["distributed"].mkdir()
    (made["distributed"] / ".metadata").write_bytes(evil)
    made["pickled_hf"] = Path(shutil.copytree(made["hf"], folder / "pickled_hf"))
    for weights in made["pickled_hf"].glob("*.safetensors"):
        weights.write_bytes(evil)

    made["pipe"] = folder / "pipe"
    os.mkfifo(made["pipe"])
    made["link"] = folder / "link"
    made["link"].symlink_to(made["folder"])
    made["linked"] = folder / "linked"  # whose temporary folder is a link
    (folder / ".tmp-linked").symlink_to(made["folder"])


@contextlib.contextmanager
def limits():
    """15 seconds and 1 GiB of address space more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + GIB
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def answer(door: str, words: list[str], names: dict[str, Path]) -> int | str | None:
    """The exit code of a door that is given these words; later flags replace its usual ones."""
    function, usual = DOORS[door]
    given = {underscored(word).split("=")[0] for word in words}
    kept = []
    is_replaced = False
    for word in shlex.split(usual.format(**names)):
        if word.startswith("--"):
            is_replaced = word in given
        if not is_replaced:
            kept.append(word)
    with limits():
        try:
            return function([*kept, *words])
        except SystemExit as stop:
            return stop.code


def files_of(names: dict[str, Path]) -> dict[Path, tuple[int, int]]:
    """The size of each file, and when it was written; what Python keeps of a file that it has
    imported is its own.
    """
    files = [path for path in names["text"].parent.rglob("*") if path.suffix != ".pyc"]
    files = [path for path in files if path.is_file()]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("row", [slow(row) if row in SLOW else row for row in ROWS])
def test_a_bad_input_is_answered_in_one_line(row, names, capsys):
    if NEEDS_NO_GPU.search(row) and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so --device cuda is no bad input")
    door, _, rest = row.partition(" ")
    before = files_of(names)
    code = answer(door, shlex.split(rest.format(**names)), names)

    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert door not in ("generate", "ids") or captured.out == ""
    assert isinstance(code, int)
    assert code != 0
    is_command = bool(lines) and lines[-1].startswith(
        ("python train.py --", "python profile_memory.py --")
    )
    assert len(lines) == 1 or (len(lines) == 2 and is_command), lines
    assert REMEDY.fullmatch(lines[-1]) or is_command, lines
    # the folder of this run of the tests has digits that are nobody's value
    said = lines[-1].replace(str(names["run"].parent), "")
    assert row in NAMELESS or names_last_flag(said, rest.format(**names)), lines
    assert files_of(names) == before


def names_last_flag(said: str, given: str) -> bool:
    """Whether an answer names the last flag, in which the fault is, or a value of it."""
    last_flag = re.split("(?:^| )--?", given.replace("=", " "))[-1]
    words = re.split('[ :,"]', last_flag.replace("-", "_"))
    names = [Path(word).name if "/" in word else word for word in words]
    return any(name in said.replace("-", "_") for name in names if name)


# ---- a full disk


@contextlib.contextmanager
def full_disk():
    """No file becomes larger than some bytes, whoever writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "row",
    [
        "train",
        "profile --json {new}",
        "step --hf {hf} --seq 32 --json {new}",
        "step --hf {hf} --seq 32 --html {new}",
        "evaluate --evals loss --batches 1 --output {new}",
        "analysis --num_samples 1 --skip_patching",
        "convert --checkpoint {run} --output {new}",
        "convert --input {hf} --output {new}",
        "prepare --vocab_size 270",
        "sums",
        "recall --tokens 2000 --lengths 16:4",
        "reward --steps 1",
    ],
)
def test_a_full_disk_is_answered_in_one_line_and_costs_no_file(row, names, tmp_path, capsys):
    door, _, rest = row.partition(" ")
    names = {**names, "new": tmp_path / "new"}
    before = files_of(names)
    with full_disk():
        code = answer(door, shlex.split(rest.format(**names)), names)

    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert isinstance(code, int)
    assert code != 0
    assert len(lines) == 1
    assert REMEDY.fullmatch(lines[0]), lines
    assert files_of(names) == before


def test_no_row_stands_twice():
    assert len(set(ROWS)) == len(ROWS)
