"""What other trainers call our flags, or we did before, so that a flag given by such a name is
answered with ours, or with why there is none.

From nanochat's scripts/base_train.py, transformers' TrainingArguments and run_clm.py, torchtitan's
job configuration and litgpt's pretrain. A name with a dot is looked up whole and then by its last
word.
"""

OUR_NAMES = {
    # the model and its weights
    "model": "model_size",
    "model_name": "model_size",
    "config_name": "model_size",
    "flavor": "model_size",
    "depth": "model_overrides",
    "model_config": "model_overrides",
    "config_overrides": "model_overrides",
    "attention": "attention_type",
    "attn_implementation": "attention_type",
    "seq_len": "context_length",
    "max_seq_len": "context_length",
    "max_seq_length": "context_length",
    "sequence_length": "context_length",
    "block_size": "context_length",
    "model_name_or_path": "init_from",
    "init_from_hf": "init_from",
    "initial_checkpoint_dir": "init_from",
    "initial_load_path": "init_from",
    "hf_assets_path": "init_from",
    # data
    "data_dir": "data",
    "data_path": "data",
    "dataset": "data",
    "dataset_name": "data",
    "dataset_path": "data",
    "train_file": "data",
    "micro_batch_size": "batch_size",
    "local_batch_size": "batch_size",
    "device_batch_size": "batch_size",
    "per_device_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "total_batch_size": "global_batch_size",
    # optimisation
    "steps": "max_steps",
    "train_steps": "max_steps",
    "num_iterations": "max_steps",
    "num_train_epochs": "max_steps",
    "epochs": "max_steps",
    "max_tokens": "max_steps",
    "learning_rate": "lr",
    "matrix_lr": "lr",
    "lr_schedule": "schedule",
    "lr_scheduler_type": "schedule",
    "decay_type": "schedule",
    "warmup": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "lr_warmup_steps": "warmup_steps",
    "lr_warmup_fraction": "warmup_steps",
    "warmdown_ratio": "schedule",
    "decay_ratio": "schedule",
    "final_lr_frac": "schedule",
    "min_lr_factor": "schedule",
    "min_lr": "schedule",
    "wd": "weight_decay",
    "adam_beta1": "adam",
    "adam_beta2": "adam",
    "eps": "adam",
    "adam_epsilon": "adam",
    "clip": "grad_clip",
    "max_norm": "grad_clip",
    "max_grad_norm": "grad_clip",
    "optim": "optimizer",
    "optimizer.name": "optimizer",
    # memory and speed
    "bf16": "dtype",
    "precision": "dtype",
    "torch_dtype": "dtype",
    "mixed_precision_param": "dtype",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpoint.mode": "gradient_checkpointing",
    "torch_compile": "compile",
    "compile.enable": "compile",
    "replicas": "dp_replicate",
    "data_parallel_replicate_degree": "dp_replicate",
    "cp": "context_parallel_size",
    "sp": "context_parallel_size",
    "context_parallel": "context_parallel_size",
    "context_parallel_degree": "context_parallel_size",
    "sequence_parallel_size": "context_parallel_size",
    "context_parallel_rotate_method": "context_parallel_mode",
    "device_type": "device",
    # the run
    "out": "output_dir",
    "out_dir": "output_dir",
    "save_dir": "output_dir",
    "dump_folder": "output_dir",
    "model_tag": "output_dir",
    "save_steps": "save_every",
    "save_interval": "save_every",
    "checkpoint.interval": "save_every",
    "save_total_limit": "keep_last",
    "keep_latest_k": "keep_last",
    "resume_from": "resume",
    "resume_from_step": "resume",
    "resume_from_checkpoint": "resume",
    "load_step": "resume",
    "async_mode": "async_save",
    "full_determinism": "deterministic",
    "eval_steps": "eval_every",
    "eval.interval": "eval_every",
    "validation.freq": "eval_every",
    "eval_tokens": "eval_rows",
    "max_iters": "eval_rows",
    "validation.steps": "eval_rows",
    "config_file": "config",
    "dry_run": "plan",
    # ours of earlier versions
    "rope_factor": "rope_scaling",
    "rope_original_context": "rope_scaling",
    "logits_threshold_gib": "model_overrides",
    "loss_chunk_size": "model_overrides",
    "eval_batches": "eval_rows",
    "save_minutes": "save_every",
    "nsa": "blocks",
    "decay_fraction": "schedule",
    "min_lr_ratio": "schedule",
    "beta1": "adam",
    "beta2": "adam",
    "adam_eps": "adam",
    "eval_lengths": "evals",
    "offload_optimizer": "master_weights",
}

LOGGED = "every step is logged"
WITHOUT_FLAG = {
    "log_every": LOGGED,
    "logging_steps": LOGGED,
    "log_interval": LOGGED,
    "log_freq": LOGGED,
    "num_workers": "rows need no worker processes",
    "dataloader_num_workers": "rows need no worker processes",
    "audit_every": "replicas are no longer compared during a run",
    "check_replicas_every": "replicas are no longer compared during a run",
}


def our_name(name: str) -> str:
    """Our flag for another trainer's, both without dashes in front; an unknown name as it is.

    ValueError for one that needs no flag here.
    """
    last = name.rpartition(".")[2]
    reason = WITHOUT_FLAG.get(last)
    if reason:
        raise ValueError(f"unknown flag --{name}: {reason}: drop it")
    return OUR_NAMES.get(name) or OUR_NAMES.get(last, last)
