"""The faults of `selfcheck.mutations`: one wrong line each, and the tests that should notice it.

`old` must occur exactly once in its file. When you change that line, change it here too; when the
fault no longer makes sense, replace it with another of the same part.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A wrong line: the text `old` of `file` replaced by `new`, and arguments of pytest that select
    the tests which should notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""  # why no test notices it, if that is known


CHECKPOINT = (
    Fault(
        "checkpoint: first block is not compared",
        "longhaul/checkpoint/load.py",
        "if digest != written]",
        "if digest != written and index]",
        ("tests/test_checkpoint.py", "-k", "checksum or flipped_bit"),
    ),
    Fault(
        "checkpoint: manifest's checksum is not compared",
        "longhaul/checkpoint/format.py",
        'if manifest.get("checksum") != checksum(manifest):',
        'if manifest.get("checksum") is None:',
        ("tests/test_checkpoint.py", "-k", "checksum or flipped_bit"),
    ),
    Fault(
        "checkpoint: one too few is kept",
        "longhaul/checkpoint/save.py",
        "_delete_old(folder, steps[:-keep])",
        "_delete_old(folder, steps[: 1 - keep])",
        ("tests/test_checkpoint.py", "-k", "pruning"),
    ),
    Fault(
        "checkpoint: old ones go before the new one verifies",
        "longhaul/checkpoint/save.py",
        "verified(steps[-1])",
        "steps[-1].stat()",
        ("tests/test_checkpoint.py", "-k", "pruning"),
    ),
    Fault(
        "checkpoint: skipped steps count as updates",
        "longhaul/checkpoint/load.py",
        "float(checkpoint.step - len(checkpoint.skipped))",
        "float(checkpoint.step)",
        ("tests/test_numerics.py", "-k", "after_a_skipped_step_a_resumed_run"),
    ),
    Fault(
        "checkpoint: data position is not restored",
        "longhaul/checkpoint/load.py",
        "state.data = checkpoint.data",
        "state.data = {}",
        (
            "tests/test_checkpoint.py",
            "tests/test_numerics.py",
            "-k",
            "data_position or resumed_run_has",
        ),
    ),
    Fault(
        "checkpoint: a stored range is read from its start",
        "longhaul/checkpoint/load.py",
        "source[first - start : last - start]",
        "source[: last - first]",
        ("tests/test_parallel.py", "-k", "checkpoint_is_the_same_bits"),
    ),
    Fault(
        "checkpoint: moments of vectors are not stored",
        "longhaul/checkpoint/format.py",
        "if value.ndim:  # step",
        "if value.ndim > 1:  # step",
        ("tests/test_checkpoint.py", "tests/test_states.py", "-k", "loaded or bit_for_bit"),
    ),
    Fault(
        "checkpoint: an optimizer setting may change unasked",
        "longhaul/checkpoint/resume.py",
        "if words and not cfg.override_settings",
        "if words and cfg.override_settings",
        ("tests/test_train.py", "-k", "changed_settings"),
    ),
    Fault(
        "checkpoint: rows of the past may be left out",
        "longhaul/checkpoint/resume.py",
        "if order.ranges_below(both, trained) != order.ranges_below(recorded, trained):",
        "if order.ranges_below(both, 0) != order.ranges_below(recorded, 0):",
        ("tests/test_numerics.py", "-k", "cannot_be_left_out"),
    ),
    Fault(
        "checkpoint: a read that fails is not tried again",
        "files/durable.py",
        "for attempt in range(RETRIES + 1):",
        "for attempt in range(1):",
        ("tests/test_supervise.py", "-k", "tried_again"),
    ),
    Fault(
        "rescue: the optimizer does not wait for it",
        "longhaul/run/rescue.py",
        "        if self.state is not None:\n            self.reading.acquire()\n",
        "        if self.state is not None:\n",
        ("tests/test_rescue.py",),
    ),
    Fault(
        "rescue: ranks save different steps",
        "longhaul/run/rescue.py",
        "if readable and len(answers) == 1:",
        "if readable:",
        ("tests/test_rescue.py",),
    ),
    Fault(
        "rescue: the micro-batch gets the whole time",
        "longhaul/dist.py",
        "min(allowed / 3, allowed - 2 * save_seconds)",
        "min(allowed, allowed - 2 * save_seconds)",
        ("tests/test_rescue.py",),
    ),
    Fault(
        "save_minutes: every rank asks its own clock",
        "longhaul/run/guard.py",
        "if self.world.rank == 0 and self._save_is_due():",
        "if self._save_is_due():",
        ("tests/test_rescue.py",),
    ),
)

DATA = (
    Fault(
        "data: a cut document loses its label at the cut",
        "data/loader.py",
        "ids = self.split.read(document, start, length + 1)",
        "ids = self.split.read(document, start, length)",
        ("tests/test_data_loader.py", "-k", "keeps_its_label_across"),
    ),
    Fault(
        "data: positions do not restart with a piece",
        "data/loader.py",
        "row.positions[:] = np.arange(self.context_length) - np.repeat(starts, lengths)",
        "row.positions[:] = np.arange(self.context_length)",
        ("tests/test_data_loader.py", "-k", "obvious_loop"),
    ),
    Fault(
        "data: padding has a label",
        "data/loader.py",
        "row.labels[end:] = IGNORE",
        "row.labels[end:] = self.dataset.eod_id",
        ("tests/test_data_loader.py", "-k", "padding_is_at_the_end"),
    ),
    Fault(
        "data: ranks read the same rows",
        "data/loader.py",
        "begin = step * rows + rank * share",
        "begin = step * rows",
        ("tests/test_data_loader.py", "-k", "ranks_together"),
    ),
    Fault(
        "data: a corpus that is not behind its share may be next",
        "data/mixture.py",
        "if deficits[corpus] < period:",
        "if deficits[corpus] < 0:",
        ("tests/test_mixture.py", "-k", "within_one_row"),
    ),
    Fault(
        "data: a corpus begins again with every period",
        "data/mixture.py",
        "return corpus, periods * self.per_period[corpus] + int(self.before[place])",
        "return corpus, int(self.before[place])",
        ("tests/test_mixture.py", "-k", "turns or its_own_order"),
    ),
    Fault(
        "data: shares may change without being asked for",
        "longhaul/checkpoint/resume.py",
        "if not cfg.override_settings and checkpoint.step < cfg.max_steps:\n            raise",
        "if cfg.override_settings and checkpoint.step < cfg.max_steps:\n            raise",
        ("tests/test_mixture.py", "-k", "changed_shares"),
    ),
    Fault(
        "data: a stage goes on in the order of the one before",
        "data/staged.py",
        "own = order.positions(step - first_step, rank, world_size)",
        "own = order.positions(step, rank, world_size)",
        ("tests/test_length_schedule.py", "-k", "own_order"),
    ),
    Fault(
        "data: a stage keeps the rotary base of the one before",
        "longhaul/lengths.py",
        "ratio = length.tokens / before.tokens if proportional else 1.0",
        "ratio = 1.0",
        ("tests/test_length_schedule.py", "-k", "bases"),
    ),
    Fault(
        "data: a short stage has the rows of the longest",
        "longhaul/config.py",
        "batch_size=self.batch_size * ratio,\n            global",
        "batch_size=self.batch_size,\n            global",
        ("tests/test_length_schedule.py", "-k", "same_tokens"),
    ),
    Fault(
        "data: a round of the shuffle mixes key and half in another order",
        "data/order.py",
        "mixed = mix(right ^ key) & mask",
        "mixed = (mix(right) ^ key) & mask",
        ("tests/test_data_order.py", "-k", "known_values"),
    ),
    Fault(
        "data: every epoch has the same order",
        "data/order.py",
        "+ GOLDEN + epoch) & MASK",
        "+ GOLDEN) & MASK",
        ("tests/test_data_order.py", "-k", "seed_and_epoch or known_values"),
    ),
    Fault(
        "data: a row outside is permuted once more only",
        "data/order.py",
        "    while row >= n:",
        "    if row >= n:",
        ("tests/test_data_order.py", "-k", "exactly_once or distinct"),
    ),
    Fault(
        "data: the first row after a skipped range is skipped too",
        "data/order.py",
        "if position < begin:",
        "if position < begin - 1:",
        ("tests/test_numerics.py", "-k", "counting_the_positions"),
    ),
    Fault(
        "data: pieces go to the emptiest row",
        "data/packing.py",
        "index = bisect_left(rooms, length)",
        "index = max(bisect_left(rooms, length), len(rooms) - 1)",
        ("tests/test_data_packing.py", "-k", "best_fit or fullest_row"),
    ),
    Fault(
        "data: ids of 17 bits are stored in 16",
        "data/manifest.py",
        "if vocab_size <= 1 << 16 else",
        "if vocab_size <= 1 << 17 else",
        ("tests/test_data_shards.py", "-k", "width_of_an_id"),
    ),
    Fault(
        "data: validation documents are trained on",
        "data/dataset.py",
        '"train": np.delete(everything, chosen)',
        '"train": everything',
        ("tests/test_data_shards.py", "-k", "splits_share_no_document"),
    ),
    Fault(
        "data: a document's end is not marked",
        "data/writer.py",
        "if tokens[-1] != self.eod_id:",
        "if tokens[-1] == self.eod_id:",
        ("tests/test_data_shards.py", "-k", "closing_end_of_document"),
    ),
    Fault(
        "data: bits per byte are nats per byte",
        "data/dataset.py",
        "/ (self.source_bytes * math.log(2))",
        "/ self.source_bytes",
        ("tests/test_data_shards.py", "-k", "bits_per_byte"),
    ),
)

START = (
    Fault(
        "start: hashes of the checkpoint are not compared",
        "longhaul/run/start.py",
        "load.verified(start.folder)",
        "load.described(start.folder)",
        ("tests/test_start.py", "-k", "damaged"),
    ),
    Fault(
        "start: data of another tokenizer is taken",
        "longhaul/run/start.py",
        "if trained_on and trained_on != dataset.tokenizer_sha256:",
        "if trained_on and not dataset.tokenizer_sha256:",
        ("tests/test_start.py", "-k", "another_tokenizer"),
    ),
    Fault(
        "start: data of another tokenizer than the Hugging Face folder's is taken",
        "longhaul/run/start.py",
        "if theirs and ours and theirs != ours:",
        "if theirs and not ours:",
        ("tests/test_data_hugging_face.py", "-k", "init_from"),
    ),
    Fault(
        "prepare: a killed preparation keeps what was not saved",
        "data/writer.py",
        "os.truncate(path, size)",
        "os.truncate(path, path.stat().st_size)",
        ("tests/test_data_resume.py", "-k", "a_writer_continues"),
    ),
    Fault(
        "prepare: another command continues a killed one",
        "data/pipeline.py",
        'if content["key"] == digest:',
        "if digest:",
        ("tests/test_data_resume.py", "-k", "begin_anew"),
    ),
    Fault(
        "report: tokens without that much context count",
        "data/report.py",
        "np.maximum(lengths - context, 0)",
        "np.maximum(lengths - context + 1, 0)",
        ("tests/test_data_report.py", "-k", "share_of_tokens"),
    ),
    Fault(
        "sources: a zstd file that ends early is taken for whole",
        "data/inputs.py",
        "if self._frame is not None:",
        "if self._frame is not None and self._plain:",
        ("tests/test_data_sources.py", "-k", "cut_off"),
    ),
    Fault(
        "sources: a long text loses the line at a cut",
        "data/sources.py",
        "rest = content[cut:] + more",
        "rest = more",
        ("tests/test_data_sources.py", "-k", "longer_than_the_limit"),
    ),
    Fault(
        "tokenizer: special tokens are matched in the text",
        "data/hugging_face.py",
        "library.encode_special_tokens = True",
        "library.encode_special_tokens = False",
        ("tests/test_data_hugging_face.py", "-k", "special_token"),
    ),
    Fault(
        "tokenizer: a text is cut where whitespace follows",
        "data/hugging_face.py",
        r're.compile(r"\S\n(?=\S)")',
        r're.compile(r"\n")',
        ("tests/test_data_hugging_face.py", "-k", "in_parts"),
    ),
    Fault(
        "start: the context of the model that a run started from is forgotten",
        "longhaul/run/start.py",
        "return max(_row(checkpoint), round(",
        "return min(_row(checkpoint), round(",
        ("tests/test_start.py", "-k", "exports_its_own_context"),
    ),
    Fault(
        "start: sparse branches of a sparse checkpoint start fresh",
        "longhaul/checkpoint/load.py",
        'if name in stored or added.isdisjoint(name.split("."))',
        'if added.isdisjoint(name.split("."))',
        ("tests/test_start.py", "-k", "sparse_attention"),
    ),
    Fault(
        "start: a proposal is of another size than the weights",
        "longhaul/memory/fit.py",
        "if not asked.init_from:",
        "if asked.model_size:",
        ("tests/test_start.py", "-k", "proposal"),
    ),
    Fault(
        "data: a character is lost where an only document is cut",
        "data/pipeline.py",
        "tail = document.text[cut:]",
        "tail = document.text[cut + 1 :]",
        ("tests/test_data_prepare.py", "-k", "only_document"),
    ),
)

MODEL = (
    Fault(
        "model: keys are not rotated",
        "model.py",
        "k_BTGK = rotate(raw_BTGK, *rope, self.kernels)",
        "k_BTGK = raw_BTGK",
        (
            "tests/test_model.py",
            "-k",
            "every_gradient_equal_the_oracle",
        ),
    ),
    Fault(
        "model: the backward rotates forward",
        "model.py",
        "_rotated(grad_BTHK, cos_BT1k, -sin_BT1k)",
        "_rotated(grad_BTHK, cos_BT1k, sin_BT1k)",
        (
            "tests/test_model.py",
            "-k",
            "rotation_has_the_gradient",
        ),
    ),
    Fault(
        "model: linear scaling scales nothing",
        "model.py",
        "plain_k / config.rope_factor",
        "plain_k / 1.0",
        (
            "tests/test_model.py",
            "-k",
            "frequencies_equal",
        ),
    ),
    Fault(
        "model: a row does not start a document",
        "model.py",
        "starts_BT = torch.ones_like(",
        "starts_BT = torch.zeros_like(",
        (
            "tests/test_model.py",
            "-k",
            "packed_documents_equal",
        ),
    ),
    Fault(
        "model: positions run on into the next document",
        "model.py",
        "(torch.arange(int(cu_seqlens[-1])) - starts)",
        "torch.arange(int(cu_seqlens[-1]))",
        (
            "tests/test_model.py",
            "-k",
            "packed_documents_equal",
        ),
    ),
    Fault(
        "model: later chunks of a prefill see too little",
        "model.py",
        "(S - T + start)",
        "(S - T)",
        (
            "tests/test_model.py",
            "-k",
            "prefill_longer_than_a_chunk",
        ),
    ),
    Fault(
        "model: decoding restarts positions",
        "model.py",
        "offset = cache.length if cache else 0",
        "offset = 0",
        (
            "tests/test_model.py",
            "-k",
            "decoding_with_the_cache",
        ),
    ),
    Fault(
        "model: RMSNorm without epsilon",
        "model.py",
        ".add_(eps)",
        ".add_(0.0)",
        (
            "tests/test_model.py",
            "-k",
            "rmsnorm",
        ),
    ),
    Fault(
        "model: RMSNorm's gradient keeps the radial part",
        "model.py",
        "wide.sub_(normed.mul_(inner))",
        "wide.sub_(normed.mul_(0 * inner))",
        (
            "tests/test_model.py",
            "-k",
            "rmsnorm_has_the_gradient",
        ),
    ),
    Fault(
        "model: SwiGLU's gate gradient forgets up",
        "model.py",
        "silu_backward(grad * up, gate)",
        "silu_backward(grad, gate)",
        (
            "tests/test_model.py",
            "-k",
            "swiglu",
        ),
    ),
    Fault(
        "model: residual projections start twice as deep",
        "model.py",
        "math.sqrt(2 * self.config.num_layers)",
        "math.sqrt(self.config.num_layers)",
        (
            "tests/test_model.py",
            "-k",
            "documented_scale",
        ),
    ),
    Fault(
        "model: weights of one shape start equal",
        "model.py",
        'f"{seed}:{name}"',
        'f"{seed}"',
        (
            "tests/test_model.py",
            "-k",
            "initial_weights or equal_shapes",
        ),
    ),
    Fault(
        "model: ignored targets count as tokens",
        "model.py",
        "num_valid = (labels_BT != IGNORE).sum().clamp(min=1)",
        "num_valid = labels_BT.numel()",
        (
            "tests/test_model.py",
            "-k",
            "every_gradient_equal_the_oracle or num_valid",
        ),
    ),
    Fault(
        "model: logits are measured in fp32",
        "model.py",
        "seq * self.vocab_size * 2 / GIB",
        "seq * self.vocab_size * 4 / GIB",
        (
            "tests/test_model.py",
            "-k",
            "ten_gib_rule",
        ),
    ),
    Fault(
        "loss: the mean's gradient is not divided",
        "model.py",
        "constant_n = d_mean_n / len(weight_VD)",
        "constant_n = d_mean_n",
        (
            "tests/test_loss.py",
            "-k",
            "fp32_is_within and torch",
        ),
    ),
    Fault(
        "loss: softcap without its slope",
        "model.py",
        "d_NV = d_NV.mul_(chain_NV)",
        "d_NV = d_NV",
        (
            "tests/test_loss.py",
            "-k",
            "fp32_is_within and torch",
        ),
    ),
    Fault(
        "loss: the z-loss has no gradient at the label",
        "model.py",
        "d_log_sum_n * torch.exp(-nll_n)",
        "0 * d_log_sum_n",
        (
            "tests/test_loss.py",
            "-k",
            "fp32_is_within and torch",
        ),
    ),
    Fault(
        "loss: an ignored row is NaN if its logits overflow",
        "model.py",
        "exp_(below_(x_NV, max_N))",
        "exp_(x_NV.sub_(max_N[:, None]))",
        (
            "tests/test_loss.py",
            "-k",
            "ignored_rows_with_huge_logits",
        ),
    ),
    Fault(
        "loss: the sum's logarithm is lost next to huge logits",
        "model.py",
        "sums = nll_n, max_n, log_sum_n, total_n",
        "sums = nll_n, max_n, (max_n + log_sum_n) - max_n, total_n",
        (
            "tests/test_loss.py",
            "-k",
            "gradients_of_huge_logits and torch",
        ),
    ),
    Fault(
        "one pass: a later block overwrites dW",
        "model.py",
        "put_product = add_product if t.start else set_product",
        "put_product = set_product",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "float64_is_float64",
        ),
    ),
    Fault(
        "one pass: the gradient is not divided",
        "model.py",
        "each = divisor.reciprocal()",
        "each = torch.ones_like(divisor)",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "float64_is_float64",
        ),
    ),
    Fault(
        "one pass: a tile is read where another was kept",
        "model.py",
        "tile_at(buffer, n * v.start, n",
        "tile_at(buffer, 0 * v.start, n",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "float64_is_float64",
        ),
    ),
    Fault(
        "one pass: the gradient of the loss is forgotten",
        "model.py",
        "gradient.mul_(factor)",
        "gradient.mul_(1)",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "scales_both",
        ),
    ),
    Fault(
        "one pass: a second backward is given what the first one scaled",
        "model.py",
        "ctx.is_spent = True",
        "ctx.is_spent = False",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "second_backward",
        ),
    ),
    Fault(
        "one pass: blocks grow with the number of tokens",
        "model.py",
        "most = max(min(BLOCK_BYTES, 2 * FP32 * V * D) // (element * V), 1)",
        "most = max(N, 1)",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "block",
        ),
    ),
    Fault(
        "one pass: zeros for gradients that nobody asked for",
        "model.py",
        "ctx.set_materialize_grads(False)  # zeros of the size of dW otherwise",
        "pass",
        (
            "tests/test_loss_one_pass.py",
            "-k",
            "hands_over",
        ),
    ),
    Fault(
        "rope: frequencies that differ in their last bit",
        "model.py",
        "plain_k = 1.0 / wavelength_k",
        "plain_k = config.rope_theta ** -(index_k / config.head_dim)",
        (
            "tests/test_qwen3.py",
            "-k",
            "spread_over_a_long_context",
        ),
    ),
)

NSA = (
    Fault(
        "nsa: the plain window reaches one token further",
        "model.py",
        "(key > query_C1 - cfg.window)",
        "(key >= query_C1 - cfg.window)",
        (
            "tests/test_nsa.py",
            "-k",
            "small_blocks and plain",
        ),
    ),
    Fault(
        "nsa: a compressed block is seen before its end",
        "model.py",
        "last_N <= query_C1)",
        "last_N <= query_C1 + 1)",
        (
            "tests/test_nsa.py",
            "-k",
            "small_blocks and plain",
        ),
    ),
    Fault(
        "nsa: one local block too many",
        "model.py",
        "(block_J > own - cfg.sel_local)",
        "(block_J >= own - cfg.sel_local)",
        (
            "tests/test_nsa.py",
            "-k",
            "small_blocks and plain",
        ),
    ),
    Fault(
        "nsa: compressed keys turn as their first token",
        "model.py",
        "first_N * cfg.cmp_stride + cfg.cmp_block // 2",
        "first_N * cfg.cmp_stride",
        (
            "tests/test_nsa_model.py",
            "tests/test_nsa.py",
            "-k",
            "token_by_token or compression",
        ),
    ),
    Fault(
        "nsa: a block's mean is summed in bf16",
        "model.py",
        "x_BUGsK.float().sum(3)",
        "x_BUGsK.sum(3)",
        (
            "tests/test_nsa.py",
            "-k",
            "rounded_once",
        ),
    ),
    Fault(
        "nsa: position embeddings do not reach the keys",
        "model.py",
        "if pe_lK is not None:",
        "if pe_lK is None:",
        (
            "tests/test_nsa.py",
            "-k",
            "compression",
        ),
    ),
    Fault(
        "nsa: every shared stride weighs one",
        "nsa/branches.py",
        "weight = min(offset + 1, spread, per, offsets - offset)",
        "weight = 1",
        (
            "tests/test_nsa.py",
            "-k",
            "default_blocks",
        ),
    ),
    Fault(
        "nsa: the window's key gradient is not scaled",
        "nsa/engine.py",
        "dk.mul_(scale)",
        "dk",
        (
            "tests/test_nsa.py",
            "-k",
            "small_blocks and engine",
        ),
    ),
    Fault(
        "nsa: the selected branch's delta ignores the gate",
        "nsa/engine.py",
        "(dg_slc * g_slc)",
        "dg_slc",
        (
            "tests/test_nsa.py",
            "-k",
            "small_blocks and engine",
        ),
    ),
    Fault(
        "nsa: decoding's window is one token longer",
        "nsa/decode.py",
        "state.length - state.cfg.window)",
        "state.length - state.cfg.window - 1)",
        (
            "tests/test_nsa.py",
            "-k",
            "prefill_then_decoding",
        ),
    ),
    Fault(
        "clock: every step has the same position",
        "model.py",
        "self.position.add_(1)",
        "self.position.add_(0)",
        (
            "tests/test_generate.py",
            "-k",
            "steps_of_fixed_shapes",
        ),
    ),
    Fault(
        "clock: forced blocks compete",
        "nsa/decode.py",
        "rank_J = torch.where(forced_J, -(2**63), 0)",
        "rank_J = torch.where(forced_J, 0, 0)",
        (
            "tests/test_generate.py",
            "-k",
            "steps_of_fixed_shapes",
        ),
    ),
    Fault(
        "clock: keys after the token are read",
        "nsa/decode.py",
        "visible_Xnl.view(B, G, 1, -1)",
        "(visible_Xnl | True).view(B, G, 1, -1)",
        (
            "tests/test_generate.py",
            "-k",
            "steps_of_fixed_shapes",
        ),
    ),
    Fault(
        "clock: a block is compressed in the order of the ring",
        "nsa/decode.py",
        "order = (first + torch.arange(l, device=position.device)) % l",
        "order = torch.arange(l, device=position.device)",
        (
            "tests/test_generate.py",
            "-k",
            "steps_of_fixed_shapes",
        ),
    ),
    Fault(
        "fused: the backward rotates forward",
        "fused/elementwise.py",
        "not ctx.inverse)",
        "ctx.inverse)",
        (
            "tests/test_fused_elementwise.py",
            "-k",
            "rotation_equals",
        ),
    ),
    Fault(
        "fused: a program forgets its earlier rows",
        "fused/elementwise_kernels.py",
        "dw1_RB += g1_RB * n1_RB",
        "dw1_RB = g1_RB * n1_RB",
        (
            "tests/test_fused_elementwise.py",
            "-k",
            "several_parts",
        ),
    ),
)

STEP = (
    Fault(
        "step: shares of ranks are averaged once more",
        "longhaul/step.py",
        "(loss * state.world.size).backward()",
        "loss.backward()",
        (
            "tests/test_parallel.py",
            "-k",
            "test_ranks_change_nothing and not sparse and 2",
        ),
    ),
    Fault(
        "step: ranks that share a row count its tokens each",
        "longhaul/step.py",
        "return total // state.cfg.context_ranks",
        "return total",
        (
            "tests/test_context.py",
            "-k",
            "share_rows_change_nothing and not slow",
            "-m",
            "not slow",
        ),
    ),
    Fault(
        "step: a gradient of NaN updates the weights",
        "longhaul/step.py",
        "    if all_finite:\n",
        "    if True:\n",
        (
            "tests/test_numerics.py",
            "-k",
            "skipped_step_changes_nothing",
        ),
    ),
    Fault(
        "step: gradients are not cleared",
        "longhaul/step.py",
        "uncount_skipped()\n    state.optimizer.zero_grad(set_to_none=True)",
        "uncount_skipped()",
        ("tests/test_step.py",),
    ),
    Fault(
        "step: the learning rate of the next step",
        "longhaul/step.py",
        "optim.learning_rate(state.step, state.cfg)",
        "optim.learning_rate(state.step + 1, state.cfg)",
        ("tests/test_step.py",),
    ),
    Fault(
        "step: validation averages over micro-batches",
        "longhaul/step.py",
        "count += count_valid(batch, state)",
        "count += len(batch)",
        (
            "tests/test_train.py",
            "tests/test_generate.py",
            "-k",
            "metrics or evaluate",
        ),
    ),
    Fault(
        "step: neighbours are paired",
        "longhaul/step.py",
        "zip(batch[:half], batch[half:], strict=True)",
        "zip(batch[::2], batch[1::2], strict=True)",
        (
            "tests/test_supervise.py",
            "-k",
            "pairs_are_summed",
        ),
    ),
    Fault(
        "optimizer: norms decay",
        "longhaul/optim.py",
        "weight_decay=0.0)",
        "weight_decay=weight_decay)",
        ("tests/test_optim.py",),
    ),
    Fault(
        "optimizer: clipping raises small gradients",
        "longhaul/optim.py",
        ".clamp(max=1.0)",
        ".clamp(max=10.0)",
        ("tests/test_optim.py",),
    ),
    Fault(
        "optimizer: the warmup starts at zero",
        "longhaul/optim.py",
        "cfg.lr * (step + 1) / cfg.warmup_steps",
        "cfg.lr * step / cfg.warmup_steps",
        ("tests/test_optim.py",),
    ),
    Fault(
        "optimizer: bias is corrected a step late",
        "longhaul/optimizers.py",
        "before = self._steps(p) - 1",
        "before = self._steps(p)",
        (
            "tests/test_states.py",
            "-k",
            "changes_no_bit",
        ),
    ),
    Fault(
        "optimizer: bf16 weights are cut off",
        "longhaul/optimizers.py",
        "noise.add_(",
        "noise.zero_().add_(",
        (
            "tests/test_states.py",
            "-k",
            "stochastic_rounding",
        ),
    ),
    Fault(
        "optimizer: a second moment becomes zero",
        "longhaul/optimizers.py",
        "index.clamp_(min=1)",
        "index",
        (
            "tests/test_states.py",
            "-k",
            "eight_bits or small_states",
        ),
    ),
    Fault(
        "optimizer: Muon's step is that of the shorter side",
        "longhaul/optimizers.py",
        "max(p.shape) ** 0.5",
        "min(p.shape) ** 0.5",
        (
            "tests/test_states.py",
            "-k",
            "muon",
        ),
    ),
)

PARALLEL = (
    Fault(
        "parallel: tiles sum weight gradients in bf16",
        "longhaul/parallel/tiling.py",
        "torch.promote_types(w.dtype, torch.float32)",
        "w.dtype",
        (
            "tests/test_activations.py",
            "-k",
            "noisier",
        ),
    ),
    Fault(
        "parallel: head groups drop the gates' gradient of x",
        "longhaul/parallel/tiling.py",
        "dx_BTD += rest",
        "dx_BTD += 0 * rest",
        (
            "tests/test_activations.py",
            "-k",
            "no_lever_changes_a_gradient",
        ),
    ),
    Fault(
        "parallel: the last token of a tile is lost",
        "longhaul/parallel/tiling.py",
        "y_ND[tile].copy_(",
        "y_ND[tile][:-1].copy_(",
        (
            "tests/test_activations.py",
            "-k",
            "no_lever_changes_a_gradient",
        ),
    ),
    Fault(
        "parallel: a rank holds two neighbouring chunks",
        "longhaul/parallel/context.py",
        "2 * self.ranks - 1 - self.rank",
        "self.rank + 1",
        (
            "tests/test_context.py",
            "-k",
            "shards_of_a_row",
        ),
    ),
    Fault(
        "parallel: the past of a document starts with the row",
        "longhaul/parallel/context.py",
        "slice(start, first)",
        "slice(0, first)",
        (
            "tests/test_context.py",
            "-k",
            "pieces_of_all_ranks",
        ),
    ),
    Fault(
        "parallel: past and own keys swap their shares",
        "longhaul/parallel/context.py",
        "(lse_past - total).exp()",
        "(lse_BHn - total).exp()",
        (
            "tests/test_context.py",
            "-k",
            "exchanges_equal",
        ),
    ),
    Fault(
        "parallel: gathered sums in fp32 are not counted",
        "longhaul/parallel/context.py",
        "(4 * element + 8) * kv_heads",
        "4 * element * kv_heads",
        (
            "tests/test_context_plan.py",
            "-k",
            "bytes",
        ),
    ),
    Fault(
        "parallel: selective checkpointing keeps nothing",
        "longhaul/parallel/checkpointing.py",
        '"aten::_scaled_dot_product_flash_attention_for_cpu",',
        "",
        (
            "tests/test_activations.py",
            "-k",
            "selective",
        ),
    ),
    Fault(
        "parallel: gradients are reduced in bf16",
        "longhaul/parallel/apply.py",
        "reduce_dtype=torch.float32",
        "reduce_dtype=torch.bfloat16",
        (
            "tests/test_pitfalls.py",
            "-k",
            "summed_over_ranks",
        ),
    ),
)

PLANNER = (
    Fault(
        "planner: attention keeps a query less",
        "model.py",
        "3 * element * tokens * (queries + keys) + statistics",
        "element * tokens * (2 * queries + 3 * keys) + statistics",
        (
            "tests/test_plan.py",
            "-k",
            "autograd_keeps",
        ),
    ),
    Fault(
        "planner: a layer keeps a feed-forward activation less",
        "longhaul/memory/estimate.py",
        "4 * x + 3 * f +",
        "4 * x + 2 * f +",
        (
            "tests/test_plan.py",
            "-k",
            "autograd_keeps",
        ),
    ),
    Fault(
        "planner: AdamW keeps one moment",
        "longhaul/memory/estimate.py",
        '"adamw": 8.0',
        '"adamw": 4.0',
        (
            "tests/test_estimate.py",
            "tests/test_plan.py",
            "-m",
            "not slow",
        ),
    ),
    Fault(
        "planner: blocks are multiples of 256 bytes",
        "longhaul/memory/allocator.py",
        "STEP = 512",
        "STEP = 256",
        (
            "tests/test_allocator.py",
            "-k",
            "512",
        ),
    ),
    Fault(
        "planner: two ranks have no NCCL",
        "longhaul/memory/device.py",
        "ranks > 1",
        "ranks > 2",
        (
            "tests/test_allocator.py",
            "tests/test_lever_memory.py",
            "-m",
            "not slow",
        ),
    ),
    Fault(
        "planner: micro-batches of one row shrink the step",
        "longhaul/memory/fit.py",
        "cfg.gradient_accumulation_steps * cfg.batch_size",
        "cfg.gradient_accumulation_steps",
        (
            "tests/test_watch.py",
            "tests/test_train.py",
            "-k",
            "fit_auto or batch_that_is_too_large",
        ),
    ),
    Fault(
        "planner: a rung forgets the rungs below it",
        "longhaul/memory/fit.py",
        "            request = changed\n            yield Rung(lever.name, request)",
        "            yield Rung(lever.name, changed)",
        ("tests/test_fit.py",),
    ),
    Fault(
        "planner: far keys are counted at the start of a stretch",
        "longhaul/flops.py",
        "first = (start + end - SAMPLE) // 2",
        "first = start",
        ("tests/test_plan.py", "-k", "pairs_are_summed"),
    ),
    Fault(
        "planner: a proposal for a CPU has as many steps as were asked for",
        "longhaul/memory/fit.py",
        "steps = most // unit * unit",
        "steps = plan.asked.max_steps",
        ("tests/test_fit.py", "-k", "within_15_minutes"),
    ),
    Fault(
        "planner: an answer of --solve need not fit",
        "longhaul/memory/solve.py",
        "        if least > room_bytes:\n            exceeds = aim",
        "        if least > 1.05 * room_bytes:\n            exceeds = aim",
        ("tests/test_profile_memory.py", "-k", "the_longest_context_fills"),
    ),
    Fault(
        "planner: the workspace is not in the peak",
        "longhaul/memory/trace.py",
        "workspaces[time] = max(workspaces.get(time, 0), size)",
        "workspaces[time] = 0",
        (
            "tests/test_allocator.py",
            "tests/test_simulate.py",
            "-k",
            "workspace or records",
            "-m",
            "not slow",
        ),
    ),
    Fault(
        "planner: NSA queries meet whole last blocks",
        "model.py",
        "positions % nsa.sel_block + 1",
        "nsa.sel_block",
        (
            "tests/test_plan.py",
            "-k",
            "sparse_query or sparse_flops",
        ),
    ),
)

ONCE_MISSED = (
    Fault(
        "once missed: the label's logit is rounded to bf16",
        "model.py",
        "* w_nD).sum(1)",
        "* w_nD).sum(1).to(h_nD.dtype)",
        (
            "tests/test_loss.py",
            "tests/test_verify_chunked_loss.py",
            "-k",
            "labels_logit_stays and torch or documented",
        ),
    ),
    Fault(
        "once missed: the rotation is computed in bf16",
        "model.py",
        "x1, x2 = x.to(wide(x.dtype)).chunk(2, dim=-1)",
        "cos, sin = cos.to(x.dtype), sin.to(x.dtype)\n        x1, x2 = x.chunk(2, dim=-1)",
        (
            "tests/test_model.py",
            "-k",
            "rotation_in_half",
        ),
    ),
    Fault(
        "once missed: tiles of the vocabulary are summed in bf16",
        "model.py",
        "out.add_(a @ b)",
        "out.copy_((out + a @ b).to(a.dtype))",
        (
            "tests/test_loss.py",
            "-k",
            "number_of_tiles",
        ),
    ),
    Fault(
        "once missed: gathered key gradients are summed in bf16",
        "longhaul/parallel/context.py",
        "torch.zeros_like(kv_2BTGK, dtype=torch.float32)",
        "torch.zeros_like(kv_2BTGK)",
        (
            "tests/test_context.py",
            "-k",
            "summed_over_ranks",
        ),
    ),
    Fault(
        "once missed: Muon without Nesterov",
        "longhaul/optimizers.py",
        "grad.add(momentum, alpha=self.momentum)",
        "momentum",
        (
            "tests/test_states.py",
            "-k",
            "nesterov",
        ),
    ),
    Fault(
        "once missed: yarn's upper dimension is halved",
        "model.py",
        "config.head_dim - 1)",
        "config.head_dim // 2 - 1)",
        (
            "tests/test_model.py",
            "-k",
            "frequencies_equal",
        ),
    ),
    Fault(
        "once missed: the median deviation is not scaled",
        "longhaul/run/health.py",
        "1.4826 * statistics",
        "statistics",
        (
            "tests/test_numerics.py",
            "-k",
            "counts_standard_deviations",
        ),
    ),
    Fault(
        "once missed: one finite rank is enough for a step",
        "longhaul/step.py",
        "finite_ranks == state.world.size",
        "finite_ranks > 0",
        (
            "tests/test_parallel.py",
            "-k",
            "one_replica",
        ),
    ),
)

DOORS = (
    Fault(
        "doors: any tokenizer is taken",
        "longhaul/checkpoint/load.py",
        "if trained_with and sha256 != trained_with:",
        "if trained_with and not sha256:",
        ("tests/test_generate.py", "-k", "another_tokenizer"),
    ),
    Fault(
        "doors: the last of two values counts",
        "flags.py",
        "        self._refuse_repetition(words)\n",
        "",
        ("tests/test_config.py", "-k", "given_twice"),
    ),
    Fault(
        "doors: an epsilon that is not a number is taken",
        "longhaul/config.py",
        "if not 0 < self.adam_eps <= 1:",
        "if self.adam_eps <= 0:",
        ("tests/test_config.py", "-k", "epsilon"),
    ),
    Fault(
        "doors: a warmup as long as the run is not warned about",
        "longhaul/config.py",
        "        if self.warmup_steps >= self.max_steps:",
        "        if self.warmup_steps > 100 * self.max_steps:",
        ("tests/test_config.py", "-k", "warmup"),
    ),
    Fault(
        "doors: the epilogue does not wait for torchrun",
        "longhaul/epilogue.py",
        "while not select.select([end], [], [], EVERY)[0]:",
        "while not select.select([end], [], [], EVERY):",
        ("tests/test_last_words.py", "-k", "waits"),
    ),
    Fault(
        "doors: a validation counts as a step's loss",
        "longhaul/run/log.py",
        'named = {f"validation_{name}": value',
        "named = {name: value",
        ("tests/test_log.py", "-k", "without_a_steps_loss"),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *DOORS,
    *CHECKPOINT,
    *DATA,
    *START,
    *MODEL,
    *NSA,
    *STEP,
    *PARALLEL,
    *PLANNER,
    *ONCE_MISSED,
)
