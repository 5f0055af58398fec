"""Which settings of a run exclude each other, and which have no effect with the others."""

from longhaul import lengths
from longhaul.kinds import attention_kind
from longhaul.sparse.layer import BlockConfig
from model import ModelConfig, NSAConfig


def check_schedule(cfg, model: ModelConfig) -> None:
    """ValueError for a stage that cannot be built, and for positions that do not reach the
    longest one.
    """
    stages = lengths.parse(cfg.length_schedule)
    if cfg.rope_theta and stages[0].theta not in (None, cfg.rope_theta):
        raise ValueError(
            f"--rope_theta {cfg.rope_theta:g}, but the first stage of --length_schedule has "
            f"{stages[0].theta:g}: drop one of them"
        )
    if cfg.long_fraction and cfg.short_fraction:
        raise ValueError(
            "--long_fraction and --short_fraction divide the same documents: drop one of them"
        )

    reach = model.rope_reach
    if model.rope_scaling != "none" and reach < cfg.context_length:
        factor = cfg.context_length / model.rope_original_context
        raise ValueError(
            f"--rope_scaling {model.rope_scaling} reaches {reach} tokens, and "
            f"--length_schedule {cfg.context_length}: give --rope_scaling "
            f"{model.rope_scaling}:{factor:g}"
        )
    cfg.stages()


def check_attention(cfg) -> None:
    """ValueError for settings that cannot serve the kind of attention."""
    kind = attention_kind(cfg)
    if cfg.blocks and not kind.settings:  # would train another attention without a word
        raise ValueError(
            f"--blocks {' '.join(cfg.blocks)} changes nothing of --attention_type "
            f"{cfg.attention_type}: give --attention_type nsa or another sparse one, or drop "
            "--blocks"
        )
    for name, reason in kind.refused_levers.items():
        if name in cfg.changed_settings():
            raise ValueError(
                f"--{name} {getattr(cfg, name)} cannot serve {cfg.attention_type} attention, "
                f"{reason}: drop it"
            )
    if cfg.indexer_warmup and kind.learner:
        _check_warmup(cfg)


def _check_warmup(cfg) -> None:
    """ValueError for a warm-up that leaves no step to train the rest, or that cannot be."""
    if cfg.indexer_warmup >= cfg.max_steps:
        raise ValueError(
            f"--indexer_warmup {cfg.indexer_warmup} is not shorter than the run of "
            f"--max_steps {cfg.max_steps}: give at most {cfg.max_steps - 1}"
        )
    if cfg.optimizer_in_backward:
        raise ValueError(
            "--indexer_warmup leaves most weights as they are, but --optimizer_in_backward "
            "updates each weight in the backward pass: drop one of them"
        )


def check_activation_levers(cfg, model: ModelConfig) -> None:
    """ValueError for levers of layers that exclude each other."""
    groups = cfg.attention_head_groups
    if model.num_kv_heads % groups:
        raise ValueError(
            f"--attention_head_groups {groups} does not divide {model.num_kv_heads} KV heads: "
            "give a divisor"
        )
    if groups > 1:
        _check_shared_head_groups(cfg, model)

    if cfg.compile and (cfg.tiles > 1 or groups > 1):
        raise ValueError(
            "--compile cannot compile the backward pass of --mlp_tiles and "
            "--attention_head_groups: drop one of them"
        )
    if groups > 1 and cfg.gradient_checkpointing == "selective":
        raise ValueError(
            "--gradient_checkpointing selective keeps attention's outputs so that it runs "
            "once, but --attention_head_groups runs it again in the backward pass: use full"
        )
    if cfg.offload_activations and cfg.gradient_checkpointing == "none":
        raise ValueError(
            "--offload_activations moves checkpointed layer inputs, but no layer is "
            "checkpointed: add --gradient_checkpointing"
        )


def _check_shared_head_groups(cfg, model: ModelConfig) -> None:
    """ValueError if ranks that exchange heads cannot divide a head group's KV heads."""
    heads = model.num_kv_heads // cfg.attention_head_groups
    if heads % cfg.context_ranks == 0:
        return
    if cfg.context_choice(model).mode == "ulysses":
        raise ValueError(
            f"--attention_head_groups {cfg.attention_head_groups} leaves {heads} KV heads at "
            f"a time, which cannot be divided evenly among the {cfg.context_ranks} ranks that "
            "share a row: give fewer groups"
        )


def check_optimizer_levers(cfg) -> None:
    """ValueError for levers of the optimizer that exclude each other."""
    if cfg.master_weights == "none" and cfg.dtype == "fp32":
        raise ValueError(
            "--master_weights none saves nothing with --dtype fp32: use --dtype bf16, or "
            "--master_weights fp32"
        )
    if cfg.master_weights == "host" and cfg.optimizer != "adamw":
        raise ValueError(
            "--master_weights host keeps fp32 moments in host memory, but --optimizer "
            f"{cfg.optimizer} keeps others on the device: drop one of them"
        )
    if cfg.optimizer_in_backward:
        _check_optimizer_in_backward(cfg)


def _check_optimizer_in_backward(cfg) -> None:
    if cfg.optimizer == "muon":
        raise ValueError(
            "--optimizer muon orthogonalises whole matrices, but with --optimizer_in_backward "
            "each rank decides for its own shard whether to step: drop one of them"
        )
    if cfg.grad_clip:
        raise ValueError(
            "--optimizer_in_backward updates weights before the global norm is known: "
            "add --grad_clip 0"
        )


def warnings(cfg) -> list[str]:
    """What a run with these settings should be told: settings without effect, a warmup that is
    longer than the run, sparse attention over rows that are too short for it.
    """
    found = []
    for name in ineffective_settings(cfg):
        found.append(f"--{name} {getattr(cfg, name)} has no effect with the other settings")

    if cfg.warmup_steps >= cfg.max_steps:
        reached = cfg.max_steps / cfg.warmup_steps
        found.append(
            f"the run ends inside the warmup, at {reached:.0%} of the peak learning rate "
            f"(--max_steps {cfg.max_steps}, --warmup_steps {cfg.warmup_steps}): give fewer "
            "--warmup_steps"
        )

    sparse = cfg.model().attention
    if isinstance(sparse, NSAConfig) and cfg.context_length <= sparse.window:
        found.append(
            f"each window of {sparse.window} tokens holds a whole row of "
            f"{cfg.context_length}, so sparse attention only adds work: use "
            "--attention_type standard, or a longer --context_length"
        )

    if isinstance(sparse, BlockConfig) and cfg.context_length <= sparse.dense_tokens:
        found.append(
            f"--attention_type {cfg.attention_type} reads every key before position "
            f"{sparse.dense_tokens}, so rows of {cfg.context_length} have full attention: "
            "give a longer --context_length, or --blocks with a smaller count or dense_below"
        )
    return found


def ineffective_settings(cfg) -> list[str]:
    """Names of settings that were changed from their default and that the others make void."""
    only_warmup = cfg.warmup_steps >= cfg.max_steps
    ineffective = dict(
        context_parallel_mode=cfg.context_ranks == 1,
        gradient_accumulation_steps=cfg.global_batch_size > 0,
        short_fraction=not cfg.length_schedule,
        schedule=only_warmup,
        indexer_warmup=not attention_kind(cfg).learner,
    )
    changed = cfg.changed_settings()
    return [name for name in ineffective if name in changed and ineffective[name]]
