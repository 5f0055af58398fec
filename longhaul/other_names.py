"""What other trainers call our flags, so that a flag given by such a name is answered with ours,
or with why there is none.

From nanochat's scripts/base_train.py, transformers' TrainingArguments and run_clm.py, torchtitan's
job configuration and litgpt's pretrain. A name with a dot is looked up whole and then by its last
word.
"""

# Our flag, and its names elsewhere.
ELSEWHERE = {
    # the model and its weights
    "model_size": "model model_name config_name flavor",
    "model_overrides": "depth model_config config_overrides logits_threshold_gib loss_chunk_size",
    "attention_type": "attention attn_implementation",
    "context_length": "seq_len max_seq_len max_seq_length sequence_length block_size",
    "init_from": (
        "model_name_or_path init_from_hf initial_checkpoint_dir initial_load_path hf_assets_path"
    ),
    # data
    "data": "data_dir data_path dataset dataset_name dataset_path train_file",
    "batch_size": (
        "micro_batch_size local_batch_size device_batch_size per_device_batch_size "
        "per_device_train_batch_size"
    ),
    "gradient_accumulation_steps": "grad_accum accumulation_steps",
    "global_batch_size": "total_batch_size",
    # optimisation
    "max_steps": "steps train_steps num_iterations num_train_epochs epochs max_tokens",
    "lr": "learning_rate matrix_lr",
    "schedule": (
        "lr_schedule lr_scheduler_type decay_type warmdown_ratio decay_ratio final_lr_frac "
        "min_lr_factor min_lr decay_fraction min_lr_ratio"
    ),
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps lr_warmup_fraction",
    "weight_decay": "wd",
    "adam": "adam_beta1 adam_beta2 eps adam_epsilon beta1 beta2 adam_eps",
    "grad_clip": "clip max_norm max_grad_norm",
    "optimizer": "optim optimizer.name",
    # memory and speed
    "dtype": "bf16 precision torch_dtype mixed_precision_param",
    "gradient_checkpointing": "activation_checkpointing activation_checkpoint.mode",
    "compile": "torch_compile compile.enable",
    "dp_replicate": "replicas data_parallel_replicate_degree",
    "context_parallel_size": (
        "cp sp context_parallel context_parallel_degree sequence_parallel_size"
    ),
    "context_parallel_mode": "context_parallel_rotate_method",
    "device": "device_type",
    # the run
    "output_dir": "out out_dir save_dir dump_folder model_tag",
    "save_every": "save_steps save_interval checkpoint.interval",
    "keep_last": "save_total_limit keep_latest_k",
    "resume": "resume_from resume_from_step resume_from_checkpoint load_step",
    "async_save": "async_mode",
    "deterministic": "full_determinism",
    "eval_every": "eval_steps eval.interval validation.freq",
    "eval_rows": "eval_tokens max_iters validation.steps eval_batches",
    "config": "config_file",
    "plan": "dry_run gpu gpu_memory_gib vram",
    "rope_scaling": "rope_factor rope_original_context",
    "master_weights": "offload_optimizer",
}
OUR_NAMES = {name: ours for ours, names in ELSEWHERE.items() for name in names.split()}

REASONS = {
    "every step is logged": "log_every logging_steps log_interval log_freq",
    "rows need no worker processes": "num_workers dataloader_num_workers",
}
WITHOUT_FLAG = {name: reason for reason, names in REASONS.items() for name in names.split()}


def our_name(name: str) -> str:
    """Our flag for another trainer's, both without dashes in front; an unknown name as it is.

    ValueError for one that needs no flag here.
    """
    last = name.rpartition(".")[2]
    reason = WITHOUT_FLAG.get(last)
    if reason:
        raise ValueError(f"unknown flag --{name}: {reason}: drop it")
    return OUR_NAMES.get(name) or OUR_NAMES.get(last, last)
