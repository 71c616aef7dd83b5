"""Faults for `mutations.py`: realistic mistakes, each of which the default tests must catch.

A fault changes behavior that users would notice. Its tests are the narrowest set that catches it,
one or two files, so that it is decided in seconds.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One replacement in one file.

    Attributes:
      file: the module, from the root of the checkout.
      right: text that occurs once in it.
      wrong: the text in its place.
      tests: files with the tests that run, from the root.
    """

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


LOG_ATTENTION_FAULTS = {
    "a mask off by one": Fault(
        "heinsen_jax/ops/log_attention/single_level.py",
        "jnp.tri(size, dtype=bool)",
        "jnp.tri(size, k=-1, dtype=bool)",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a dropped decay": Fault(
        "heinsen_jax/ops/log_attention/single_level.py",
        "key - so_far",
        "key",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a stale state": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "return (after, _write(outputs, of_block, index)), saved",
        "return (before, _write(outputs, of_block, index)), saved",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a stale cotangent": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "return (d_before, _write(d_inputs, d_block, index)), None",
        "return (d_after, _write(d_inputs, d_block, index)), None",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a tier beyond its range": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "first_safe((used - plan.budget)[None])",
        "first_safe((used - 2 * plan.budget)[None])",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a decay without its cotangent": Fault(
        "heinsen_jax/ops/log_attention/exact.py",
        "jnp.zeros_like(decay), d_from_start",
        "jnp.zeros_like(decay), jnp.zeros_like(d_from_start)",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a window off by one": Fault(
        "heinsen_jax/ops/log_attention/variants.py",
        "_moved(before.query, 1 - window)",
        "_moved(before.query, -window)",
        ("tests/ops/log_attention/keywords_test.py",),
    ),
    "states merged without decay": Fault(
        "heinsen_jax/ops/log_attention/state.py",
        "earlier = _decayed(self, other.log_decay)\n        merged = merge_averages",
        "earlier = self\n        merged = merge_averages",
        ("tests/ops/log_attention/state_test.py",),
    ),
    "padding that counts as tokens": Fault(
        "heinsen_jax/ops/log_attention/blocks.py",
        "return jnp.pad(x, widths, constant_values=-jnp.inf)",
        "return jnp.pad(x, widths)",
        ("tests/ops/log_attention/blocks_test.py",),
    ),
    "padding that decays the state": Fault(
        "heinsen_jax/ops/log_attention/call.py",
        "log_decay=None if log_decay is None else jnp.where(each, log_decay, 0),",
        "log_decay=log_decay,",
        ("tests/ops/log_attention/state_test.py",),
    ),
    "a mask of tokens that hides none": Fault(
        "heinsen_jax/ops/log_attention/masked.py",
        "scores = jnp.where(mask, scores",
        "scores = jnp.where(attends, scores",
        ("tests/ops/log_attention/masked_test.py",),
    ),
    "a scan without the decay of its state": Fault(
        "heinsen_jax/ops/log_attention/scan.py",
        "before = state.log_z if decay is None else state.log_z + decay[:, 0]",
        "before = state.log_z",
        ("tests/ops/log_attention/state_test.py",),
    ),
    "a token in the window and before it": Fault(
        "heinsen_jax/ops/log_window/merged.py",
        "rule=Window(window_size - 1)",
        "rule=Window(window_size)",
        ("tests/ops/log_window_test.py",),
    ),
    "a merged state with the number of tokens of one": Fault(
        "heinsen_jax/ops/log_window/state.py",
        "self.num_tokens + other.num_tokens",
        "other.num_tokens",
        ("tests/ops/log_window_test.py",),
    ),
    "a split sequence without decay": Fault(
        "heinsen_jax/ops/log_attention/sharded.py",
        "for x in (query, key, log_value, log_decay) if",
        "for x in (query, key, log_value) if",
        ("tests/ops/context_test.py",),
    ),
}

OPS_FAULTS = {
    "a segment that starts a token late": Fault(
        "heinsen_jax/ops/arguments.py",
        "[(1, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        "[(2, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        ("tests/ops/linear_test.py",),
    ),
    "a swapped axis": Fault(
        "heinsen_jax/ops/layout.py",
        "x.reshape(chunks, folds // groups, groups, heads, rows // heads, features)",
        "x.reshape(chunks, folds // groups, groups, rows // heads, heads, features).swapaxes(3, 4)",
        ("tests/ops/linear_test.py",),
    ),
    "a cotangent left out": Fault(
        "heinsen_jax/ops/numerics.py",
        "d_log_weights = dx - d_log_z",
        "d_log_weights = dx",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a choice by the mildest row of a batch": Fault(
        "heinsen_jax/ops/choice.py",
        "first_safe(jnp.max(excess, 0))",
        "first_safe(jnp.min(excess, 0))",
        ("tests/ops/choice_test.py",),
    ),
    "a causal mask of softmax off by one": Fault(
        "heinsen_jax/ops/masks.py",
        "return key <= query",
        "return key < query",
        ("tests/ops/softmax_test.py",),
    ),
    "an offset of queries that is ignored": Fault(
        "heinsen_jax/ops/softmax.py",
        "rule(offset + jnp.arange(length)[:, None]",
        "rule(jnp.arange(length)[:, None]",
        ("tests/ops/softmax_test.py",),
    ),
    "visible padding of a tile": Fault(
        "heinsen_jax/ops/tiled.py",
        " & (keys < problem.keys)[None]",
        "",
        ("tests/ops/softmax_test.py",),
    ),
    "a block pattern off by one": Fault(
        "heinsen_jax/ops/local.py",
        "return masks.Window(block_size - 1)",
        "return masks.Window(block_size)",
        ("tests/ops/softmax_test.py",),
    ),
    "a value that is added in place of erased": Fault(
        "heinsen_jax/ops/matrix_state.py",
        "value = value - matmul(erase, state)",
        "value = value + matmul(erase, state)",
        ("tests/ops/gated_delta_rule_test.py",),
    ),
    "a decay of features one token late": Fault(
        "heinsen_jax/ops/matrix_state.py",
        "summed = ((boundary <= s) & (s <= t)) | ((t < s) & (s < boundary))",
        "summed = ((boundary < s) & (s <= t)) | ((t < s) & (s < boundary))",
        ("tests/ops/gated_delta_rule_test.py",),
    ),
    "states merged without the later transition": Fault(
        "heinsen_jax/ops/gated_delta_rule.py",
        "return MatrixState(matrix, other.transition * self.transition)",
        "return MatrixState(matrix, self.transition)",
        ("tests/ops/gated_delta_rule_test.py",),
    ),
    "a stabilizer one token late": Fault(
        "heinsen_jax/ops/mlstm.py",
        "jnp.exp(-m[..., 1:, :])",
        "jnp.exp(-m[..., :-1, :])",
        ("tests/ops/mlstm_test.py",),
    ),
    "a token counted twice in both directions": Fault(
        "heinsen_jax/ops/linear.py",
        "jax.tree.map(jnp.zeros_like, state), attends_to_itself=False)",
        "jax.tree.map(jnp.zeros_like, state))",
        ("tests/ops/linear_test.py",),
    ),
    "a decay to the end that includes the token's own": Fault(
        "heinsen_jax/ops/linear_recurrence.py",
        "later = jnp.concatenate([steps[1:], jnp.zeros_like(steps[:1])])",
        "later = steps",
        ("tests/ops/linear_recurrence_test.py",),
    ),
    "a window of averages off by one": Fault(
        "heinsen_jax/ops/pooling.py",
        "age < window",
        "age <= window",
        ("tests/ops/additive_test.py",),
    ),
    "a window of weights off by one": Fault(
        "heinsen_jax/ops/additive.py",
        "visible &= age < local_window_size",
        "visible &= age <= local_window_size",
        ("tests/ops/additive_test.py",),
    ),
    "routed tokens without their weights": Fault(
        "heinsen_jax/ops/colt5.py",
        "_routed(x, key_value_routing) * key_value_routing.weights[..., None]",
        "_routed(x, key_value_routing)",
        ("tests/ops/colt5_test.py",),
    ),
    "a denominator bias that is ignored": Fault(
        "heinsen_jax/ops/l1.py",
        "empty = largest, jnp.ones_like(largest)",
        "empty = largest, jnp.zeros_like(largest)",
        ("tests/ops/l1_test.py",),
    ),
    "a gradient of keys with the wrong sign": Fault(
        "heinsen_jax/ops/l1_sparse.py",
        "_put(sums[1], source, -d)",
        "_put(sums[1], source, d)",
        ("tests/ops/l1_sparse_test.py",),
    ),
    "the last rows of a projection for a short sequence": Fault(
        "heinsen_jax/ops/linformer.py",
        "projection = projection[..., :sources, :]",
        "projection = projection[..., -sources:, :]",
        ("tests/ops/linformer_test.py",),
    ),
    "a group that is visible before it is complete": Fault(
        "heinsen_jax/ops/memory_compressed.py",
        "return key * self.size - 1 <= query",
        "return (key - 1) * self.size <= query",
        ("tests/ops/memory_compressed_test.py",),
    ),
    "a scale without the rotary features": Fault(
        "heinsen_jax/ops/mla.py",
        "scale = 1 / math.sqrt(max(depth + query_pe.shape[-1], 1))",
        "scale = 1 / math.sqrt(max(depth, 1))",
        ("tests/ops/mla_test.py",),
    ),
    "random features of keys without their norm": Fault(
        "heinsen_jax/ops/performer.py",
        "log_key = _plus(log_key - key_norm, epsilon)",
        "log_key = _plus(log_key, epsilon)",
        ("tests/ops/performer_test.py",),
    ),
    "a memory that is not written": Fault(
        "heinsen_jax/ops/rmt.py",
        "written = lax.dynamic_slice_in_dim(y, end, size, -2)",
        "written = lax.dynamic_slice_in_dim(y, 0, size, -2)",
        ("tests/ops/rmt_test.py",),
    ),
    "a rotation in the other direction": Fault(
        "heinsen_jax/ops/rotary.py",
        "[first * cos - second * sin, first * sin + second * cos]",
        "[first * cos + second * sin, second * cos - first * sin]",
        ("tests/ops/rotary_test.py",),
    ),
    "a scale that is squared": Fault(
        "heinsen_jax/ops/taylor.py",
        "scale ** (power / 2)",
        "scale**power",
        ("tests/ops/taylor_test.py",),
    ),
    "a radius off by one": Fault(
        "heinsen_jax/ops/tglobal.py",
        "(offset >= -radius)",
        "(offset > -radius)",
        ("tests/ops/tglobal_test.py",),
    ),
    "a shard boundary that no segment crosses": Fault(
        "heinsen_jax/ops/context.py",
        "before = jnp.concatenate([first[:1], last[:-1]])",
        "before = jnp.concatenate([first[:1], first[:-1]])",
        ("tests/ops/context_test.py",),
    ),
    "a segment that continues the one before it": Fault(
        "heinsen_jax/ops/context.py",
        "before = _where(continues, after, empty)",
        "before = after",
        ("tests/ops/context_test.py",),
    ),
    "own tokens that count twice": Fault(
        "heinsen_jax/ops/context.py",
        "visible = _where(device == index, visible, visible.merge(state))",
        "visible = visible.merge(state)",
        ("tests/ops/context_test.py",),
    ),
}

ATTENTION_FAULTS = {
    "an undeclared capability that is not checked": Fault(
        "heinsen_jax/attention/base.py",
        '"segments": segment_ids is not None,',
        '"segments": False,',
        ("tests/attention/base_test.py",),
    ),
    "a cache that tells the position after new tokens": Fault(
        "heinsen_jax/attention/cache.py",
        "return TokenCache(arrays, start + count), start",
        "return TokenCache(arrays, start + count), start + count",
        ("tests/attention/cache_test.py",),
    ),
    "an empty slot of a window that counts": Fault(
        "heinsen_jax/attention/cache.py",
        "jnp.maximum(self.size - self.num_tokens, 0)",
        "jnp.maximum(self.size - self.num_tokens - 1, 0)",
        ("tests/attention/cache_test.py",),
    ),
    "a state of a window that is too short": Fault(
        "heinsen_jax/attention/dilated.py",
        "return (self.config.window_size - 1) * self.config.dilation",
        "return self.config.window_size - 1",
        ("tests/attention/cache_test.py",),
    ),
    "forget gates that a state drops": Fault(
        "heinsen_jax/attention/fox.py",
        "query_offset=offset, log_decay=cached[..., 0]",
        "query_offset=offset",
        ("tests/attention/cache_test.py",),
    ),
    "latent keys whose positions restart": Fault(
        "heinsen_jax/attention/mla.py",
        "positions = start + jnp.arange(x.shape[-2])",
        "positions = jnp.arange(x.shape[-2])",
        ("tests/attention/cache_test.py",),
    ),
    "a global token that is part of the window, too": Fault(
        "heinsen_jax/attention/longformer.py",
        "near = (slot >= count)[None] & (at",
        "near = (slot >= 0)[None] & (at",
        ("tests/attention/cache_test.py",),
    ),
    "scaled and unscaled frequencies exchanged": Fault(
        "heinsen_jax/attention/rotary.py",
        "unchanged * found + (1 - unchanged) * scaled",
        "unchanged * scaled + (1 - unchanged) * found",
        ("tests/attention/rotary_test.py",),
    ),
    "slopes of ALiBi from head 0": Fault(
        "heinsen_jax/attention/softmax.py",
        "heads = np.arange(1, self.num_heads + 1)",
        "heads = np.arange(self.num_heads)",
        ("tests/attention/softmax_test.py",),
    ),
    "a wrong default of key/value heads": Fault(
        "heinsen_jax/attention/gqa.py",
        "self.num_heads // 4 if self.num_heads % 4 == 0 else 1",
        "self.num_heads // 4 or 1",
        ("tests/attention/softmax_test.py",),
    ),
    "columns of key/value heads in another order": Fault(
        "heinsen_jax/attention/heads.py",
        "np.repeat(x, group, 0).ravel()",
        "np.tile(x, (group, 1)).ravel()",
        ("tests/attention/heads_test.py",),
    ),
    "biases with weight decay": Fault(
        "heinsen_jax/attention/layers.py",
        '{"logical_axes": logical_axes[1:], "kind": "vector"}',
        '{"logical_axes": logical_axes[1:], "kind": "matrix"}',
        ("tests/training/optimizer_test.py",),
    ),
    "initial decays with the wrong sign": Fault(
        "heinsen_jax/attention/layers.py",
        "layer.bias[...] = jnp.log(timescales)",
        "layer.bias[...] = -jnp.log(timescales)",
        ("tests/attention/log_test.py",),
    ),
    "a wrong initial scale": Fault(
        "heinsen_jax/attention/log.py",
        "INITIAL_SCALE = 2.0",
        "INITIAL_SCALE = 1.0",
        ("tests/attention/log_test.py",),
    ),
    "a convolution that restarts": Fault(
        "heinsen_jax/attention/matrix_state.py",
        "before = None if call.state is None else call.state.convolutions[index]",
        "before = None",
        ("tests/attention/matrix_state_test.py",),
    ),
    "a convolution whose state is a token old": Fault(
        "heinsen_jax/attention/convolution.py",
        "return y, together[..., length:, :]",
        "return y, together[..., length - 1 : -1, :]",
        ("tests/models/parts_test.py",),
    ),
    "positions that restart with each chunk": Fault(
        "heinsen_jax/attention/retnet.py",
        "before = 0 if count is None else count",
        "before = 0",
        ("tests/attention/matrix_state_test.py",),
    ),
    "decays without their temperature": Fault(
        "heinsen_jax/attention/gla.py",
        "TEMPERATURE = 16.0",
        "TEMPERATURE = 1.0",
        ("tests/attention/matrix_state_test.py",),
    ),
    "shares of values between -1 and 1": Fault(
        "heinsen_jax/attention/deltanet.py",
        "beta = 2 * beta",
        "beta = 2 * beta - 1",
        ("tests/attention/matrix_state_test.py",),
    ),
    "keys that are the forget gates": Fault(
        "heinsen_jax/attention/hgrn2.py",
        "(-jnp.expm1(log_forget))",
        "jnp.exp(log_forget)",
        ("tests/attention/matrix_state_test.py",),
    ),
    "values that are not scaled by the step": Fault(
        "heinsen_jax/attention/mamba2.py",
        '"write": step}',
        '"write": jnp.ones_like(step)}',
        ("tests/attention/matrix_state_test.py",),
    ),
    "queries of the source": Fault(
        "heinsen_jax/attention/heads.py",
        "query = self._part(x, apart,",
        "query = self._part(source, apart,",
        ("tests/attention/heads_test.py",),
    ),
    "a mask of queries taken for one of keys": Fault(
        "heinsen_jax/attention/flax_fn.py",
        "if (mask == of_keys).all():",
        "if (mask == of_keys).any():",
        ("tests/attention/flax_fn_test.py",),
    ),
    "importance weights without their window": Fault(
        "heinsen_jax/attention/additive.py",
        "first, second = (additive_weights(x, local_window_size=window) for x in logits)",
        "first, second = (additive_weights(x) for x in logits)",
        ("tests/attention/additive_test.py",),
    ),
    "positions of a window that restart": Fault(
        "heinsen_jax/attention/log_window.py",
        "before = None if call.state is None else call.state.num_tokens[..., 0]",
        "before = None",
        ("tests/attention/states_test.py",),
    ),
    "a radius off by one after a state": Fault(
        "heinsen_jax/attention/tglobal.py",
        "(near_offset >= -self.config.radius)",
        "(near_offset > -self.config.radius)",
        ("tests/attention/states_test.py",),
    ),
    "a sum of the begun block that restarts": Fault(
        "heinsen_jax/attention/tglobal.py",
        "sums = sums.at[..., 0, :].add(state.begun)",
        "sums = sums.at[..., 0, :].add(0)",
        ("tests/attention/states_test.py",),
    ),
    "a state of a local pattern that is too short": Fault(
        "heinsen_jax/attention/block_sparse.py",
        "return self.config.block_size - 1 if",
        "return self.config.block_size - 2 if",
        ("tests/attention/states_test.py",),
    ),
    "queries at the first slot of a window": Fault(
        "heinsen_jax/attention/masked.py",
        '{"query_offset": state.size,',
        '{"query_offset": 0,',
        ("tests/attention/cache_test.py",),
    ),
    "forget gates that begin closed": Fault(
        "heinsen_jax/attention/mlstm.py",
        "jnp.linspace(3, 6,",
        "jnp.linspace(-3, -6,",
        ("tests/attention/matrix_state_test.py",),
    ),
}

MODELS_FAULTS = {
    "positions that ignore the state": Fault(
        "heinsen_jax/models/position.py",
        "initial=initial_state.h)",
        "initial=jnp.zeros_like(initial_state.h))",
        ("tests/models/parts_test.py",),
    ),
    "positions that continue from one document to the next": Fault(
        "heinsen_jax/models/position.py",
        "jnp.where(starts, -jnp.inf, log_coefficients)",
        "log_coefficients",
        ("tests/models/segments_test.py",),
    ),
    "a branch with the wrong input": Fault(
        "heinsen_jax/models/blocks.py",
        "self.mlp_norm(before_attention if self.is_parallel else x)",
        "self.mlp_norm(x)",
        ("tests/models/parts_test.py",),
    ),
    "a token id past the vocabulary": Fault(
        "heinsen_jax/models/language_model.py",
        "if low < 0 or high >= vocab_size:",
        "if low < 0 or high > vocab_size:",
        ("tests/models/language_model_test.py",),
    ),
    "an MLP of the wrong width": Fault(
        "heinsen_jax/models/config.py",
        "math.ceil(wide * 2 / 3 / 16) * 16",
        "math.ceil(wide / 16) * 16",
        ("tests/models/parts_test.py",),
    ),
    "weights of another layer": Fault(
        "heinsen_jax/models/conversion.py",
        'rest}", layer // period, columns)',
        'rest}", layer % period, columns)',
        ("tests/models/conversion_test.py",),
    ),
    "FLOPs without the backward pass": Fault(
        "heinsen_jax/models/flops.py",
        "return 6.0 * parameters",
        "return 2.0 * parameters",
        ("tests/models/language_model_test.py",),
    ),
    "a pattern without its repeats": Fault(
        "heinsen_jax/models/layers.py",
        "for x in named for _ in range(x.repeats))",
        "for x in named)",
        ("tests/models/layers_test.py",),
    ),
    "a soft cap that shrinks all logits": Fault(
        "heinsen_jax/models/readout.py",
        "logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)",
        "logits = jnp.tanh(logits / self.soft_cap)",
        ("tests/models/parts_test.py",),
    ),
}

TRAINING_FAULTS = {
    "a learning rate one step ahead": Fault(
        "heinsen_jax/training/optimizer.py",
        "jnp.arange(steps))",
        "jnp.arange(1, steps + 1))",
        ("tests/training/optimizer_test.py",),
    ),
    "weight decay of scales": Fault(
        "heinsen_jax/training/optimizer.py",
        'lambda kind: kind != "vector"',
        'lambda kind: kind != "embedding"',
        ("tests/training/optimizer_test.py",),
    ),
    "an average of the weights that is not updated": Fault(
        "heinsen_jax/training/step.py",
        "old + rate * (new - old)",
        "old",
        ("tests/training/step_test.py",),
    ),
    "gradients of a sum in place of a mean": Fault(
        "heinsen_jax/training/step.py",
        "return loss / count, jax.tree.map(lambda x: x / count, gradients)",
        "return loss / count, gradients",
        ("tests/training/step_test.py",),
    ),
    "a skipped update that is not a step": Fault(
        "heinsen_jax/training/step.py",
        "return TrainState(state.step + 1,",
        "return TrainState(state.step + is_good,",
        ("tests/training/step_test.py",),
    ),
    "skips that add up over a whole run": Fault(
        "heinsen_jax/training/guard.py",
        "jnp.where(is_good, 0, self.consecutive_skips + 1)",
        "self.consecutive_skips + ~is_good",
        ("tests/training/step_test.py",),
    ),
    "random weights in place of given ones": Fault(
        "heinsen_jax/training/state.py",
        "initial = flatten_with_names(parameters) | {**given}",
        "initial = {**given} | flatten_with_names(parameters)",
        ("tests/training/state_test.py",),
    ),
    "a loss over tokens that were not masked": Fault(
        "heinsen_jax/objectives/objective.py",
        "targets, drawn & loss_mask)",
        "targets, loss_mask)",
        ("tests/objectives/objective_test.py",),
    ),
    "a z-loss that is not squared": Fault(
        "heinsen_jax/objectives/cross_entropy.py",
        "jax.nn.logsumexp(logits, -1) ** 2",
        "jax.nn.logsumexp(logits, -1)",
        ("tests/objectives/cross_entropy_test.py",),
    ),
    "weights of two losses exchanged": Fault(
        "heinsen_jax/objectives/cross_entropy.py",
        "divergence_weight * divergence - (1 - divergence_weight) * log_chosen",
        "(1 - divergence_weight) * divergence - divergence_weight * log_chosen",
        ("tests/training/distillation_test.py",),
    ),
    "a teacher that may change": Fault(
        "heinsen_jax/training/distillation.py",
        "path.read_text() != self.weights_hash",
        "not path.read_text()",
        ("tests/training/distillation_test.py",),
    ),
    "a bucket of positions off by one": Fault(
        "heinsen_jax/objectives/loss_by_position.py",
        'side="right"',
        'side="left"',
        ("tests/objectives/loss_by_position_test.py",),
    ),
    "an evaluation of the last batch alone": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "np.asarray(old + new) for",
        "np.asarray(new) for",
        ("tests/objectives/evaluation_test.py",),
    ),
    "bits per token in place of bits per byte": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "found.loss / math.log(2) / dataset.bytes_per_token",
        "found.loss / math.log(2)",
        ("tests/objectives/evaluation_test.py",),
    ),
    "a mixture whose sources count alike": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "return sum(w * x for w, x in pairs) / sum(w for w, _ in pairs)",
        "return sum(x for _, x in pairs) / len(pairs)",
        ("tests/faults/mixture_test.py",),
    ),
    "a loss that is not a number as the best": Fault(
        "heinsen_jax/runs/checkpoints.py",
        '-math.inf if math.isnan(metrics["loss"]) else -metrics["loss"]',
        'math.inf if math.isnan(metrics["loss"]) else -metrics["loss"]',
        ("tests/training/checkpoint_test.py",),
    ),
    "weights loaded in place of their average": Fault(
        "heinsen_jax/runs/load.py",
        'name = "average" if has_average else "parameters"',
        'name = "parameters"',
        ("tests/training/checkpoint_test.py",),
    ),
    "the oldest checkpoint as the latest": Fault(
        "heinsen_jax/runs/checkpoints.py",
        "return self._first_intact(sorted(self._steps, reverse=True))",
        "return self._first_intact(sorted(self._steps))",
        ("tests/training/checkpoint_test.py",),
    ),
    "a file that no process verifies": Fault(
        "heinsen_jax/runs/checksums.py",
        "arrays[share::shares]",
        "arrays[share + 1 :: shares]",
        ("tests/training/checkpoint_test.py",),
    ),
    "a shard that loses its first array": Fault(
        "heinsen_jax/runs/weights.py",
        "            shards.append({})\n        shards[-1][name] = x",
        "            shards.append({})\n            continue\n        shards[-1][name] = x",
        ("tests/runs/weights_test.py",),
    ),
    "metrics of the resumed step that are lost": Fault(
        "heinsen_jax/training/metrics.py",
        'if row["step"] <= start_step]',
        'if row["step"] < start_step]',
        ("tests/training/metrics_test.py",),
    ),
    "metrics that are not flushed": Fault(
        "heinsen_jax/training/metrics.py",
        "            self._file.flush()\n",
        "",
        ("tests/training/metrics_test.py",),
    ),
    "too many updates in flight": Fault(
        "heinsen_jax/training/pacing.py",
        "(0 if is_slow else self.MOST - 1)",
        "(0 if is_slow else self.MOST + 1)",
        ("tests/faults/work_lost_test.py",),
    ),
    "a signal that hides the first one": Fault(
        "heinsen_jax/runtime/signals.py",
        "self.first = self.first or number",
        "self.first = number",
        ("tests/runtime/signals_test.py",),
    ),
    "a thread that outlives its iterator": Fault(
        "heinsen_jax/runtime/timeouts.py",
        "    finally:\n        wanted.put(False)",
        "    finally:\n        pass",
        ("tests/runtime/timeouts_test.py",),
    ),
    "a tracked run that is not resumed": Fault(
        "heinsen_jax/training/trackers.py",
        "replace(run, id=ids.get(tracker.name))",
        "replace(run, id=None)",
        ("tests/training/trackers_test.py",),
    ),
    "free memory without the page cache": Fault(
        "heinsen_jax/training/memory.py",
        "limit - used + cached",
        "limit - used",
        ("tests/faults/memory_test.py",),
    ),
    "a model without an id for the mask": Fault(
        "heinsen_jax/training/prepare.py",
        "if model.vocab_size == (vocabulary := dataset.vocab_size):",
        "if model.vocab_size < (vocabulary := dataset.vocab_size):",
        ("tests/training/prepare_test.py",),
    ),
    "data that resume a step early": Fault(
        "heinsen_jax/training/loop.py",
        "start_step=start,\n            process_index",
        "start_step=max(start - 1, 0),\n            process_index",
        ("tests/training/loop_test.py",),
    ),
    "a cause of an error that is not considered": Fault(
        "heinsen_jax/runs/storage_errors.py",
        "causes = [error, error.__cause__, error.__context__]",
        "causes = [error]",
        ("tests/runs/storage_errors_test.py",),
    ),
    "a device out of memory taken for a full disk": Fault(
        "heinsen_jax/runs/storage_errors.py",
        "    if isinstance(error, jax.errors.JaxRuntimeError):\n        return False\n",
        "",
        ("tests/runs/storage_errors_test.py",),
    ),
}

DATA_FAULTS = {
    "a prediction across two documents": Fault(
        "heinsen_jax/data/packing.py",
        "is_token & (ids[1:] == ids[:-1])",
        "is_token",
        ("tests/data/packing_test.py",),
    ),
    "an order that does not depend on the seed": Fault(
        "heinsen_jax/data/text.py",
        "rows = starts.seed(seed).shuffle()",
        "rows = starts.seed(0).shuffle()",
        ("tests/data/pipeline_test.py",),
    ),
    "the same rows for all processes": Fault(
        "heinsen_jax/data/pipeline.py",
        "row(step * config.batch_size + process_index * local_batch + place)",
        "row(step * config.batch_size + place)",
        ("tests/data/pipeline_test.py",),
    ),
    "a last batch that is lost": Fault(
        "heinsen_jax/data/pipeline.py",
        "count = math.ceil(len(rows) / config.batch_size)",
        "count = len(rows) // config.batch_size",
        ("tests/data/pipeline_test.py",),
    ),
    "a stage of a mixture that begins a row late": Fault(
        "heinsen_jax/data/mixture.py",
        "stage = bisect.bisect_right(begins, number) - 1",
        "stage = max(bisect.bisect_left(begins, number) - 1, 0)",
        ("tests/data/mixture_test.py",),
    ),
    "rows of one source before rows of the next": Fault(
        "heinsen_jax/data/dataset.py",
        "sorted(places, key=lambda x: (x[1] + 0.5) / len(sources[x[0]]))",
        "places",
        ("tests/data/mixture_test.py",),
    ),
    "a last article that is lost": Fault(
        "heinsen_jax/data/documents.py",
        '        article.append(line)\n    yield "".join(article)',
        "        article.append(line)",
        ("tests/data/documents_test.py",),
    ),
    "a column of texts that is ignored": Fault(
        "heinsen_jax/data/documents.py",
        "isinstance(text := row.get(column), str)",
        'isinstance(text := row.get("text"), str)',
        ("tests/data/documents_test.py",),
    ),
    "a missing fsync": Fault(
        "heinsen_jax/storage/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        ("tests/storage/files_test.py",),
    ),
    "a missing flush": Fault(
        "heinsen_jax/storage/files.py",
        "            file.flush()\n",
        "",
        ("tests/storage/files_test.py",),
    ),
    "an id that does not fit its type": Fault(
        "heinsen_jax/data/manifest.py",
        '"uint16" if vocab_size <= 2**16 else "uint32"',
        '"uint16" if vocab_size <= 2**16 + 1 else "uint32"',
        ("tests/data/manifest_test.py",),
    ),
    "validation text in training": Fault(
        "heinsen_jax/data/units.py",
        'yield "train", document.text[:cut]',
        'yield "train", document.text',
        ("tests/data/prepare_test.py",),
    ),
    "a preparation that begins again": Fault(
        "heinsen_jax/data/prepare.py",
        "left = [unit for unit in units if read_record(unit, output) is None]",
        "left = units",
        ("tests/data/prepare_test.py",),
    ),
    "special tokens found in a text": Fault(
        "heinsen_jax/data/tokenizer_json.py",
        "tokenizer.encode_special_tokens = True",
        "tokenizer.encode_special_tokens = False",
        ("tests/data/tokenizer_json_test.py",),
    ),
    "a start token that is dropped": Fault(
        "heinsen_jax/data/tokenizer_pretrained.py",
        "start = tuple(ids[: next(places, 0)])",
        "start = ()",
        ("tests/data/tokenizer_pretrained_test.py",),
    ),
    "a stop token that is dropped": Fault(
        "heinsen_jax/data/tokenizer_files.py",
        "for path in (folder / GENERATION_FILE, folder / CONFIG_FILE):",
        "for path in (folder / CONFIG_FILE,):",
        ("tests/data/tokenizer_pretrained_test.py",),
    ),
    "a fingerprint without special tokens": Fault(
        "heinsen_jax/data/tokenizer_tiktoken.py",
        "        digest.update(json.dumps(special_tokens, sort_keys=True).encode())\n",
        "",
        ("tests/data/tokenizers_test.py",),
    ),
    "a tokenizer trained on validation text": Fault(
        "heinsen_jax/data/train_tokenizer.py",
        'if document.split != "validation":',
        "if document:",
        ("tests/data/train_tokenizer_test.py",),
    ),
    "an answer that is the query": Fault(
        "heinsen_jax/data/tasks.py",
        "tokens[length] = tokens[place + 1]",
        "tokens[length] = tokens[place]",
        ("tests/data/tasks_test.py",),
    ),
    "validation examples that are trained on": Fault(
        "heinsen_jax/data/tasks.py",
        "_Examples(task, (1,))",
        "_Examples(task, (0, 0))",
        ("tests/data/tasks_test.py",),
    ),
    "permutations composed in the other order": Fault(
        "heinsen_jax/data/groups.py",
        "number[tuple(a[i] for i in b)] for b",
        "number[tuple(b[i] for i in a)] for b",
        ("tests/data/tasks_test.py",),
    ),
    "a test split used for validation": Fault(
        "heinsen_jax/data/sources.py",
        '        if name != "test"\n',
        "",
        ("tests/data/sources_test.py",),
    ),
    "a download that is not verified": Fault(
        "heinsen_jax/data/download.py",
        "if sha256 != remote.sha256:",
        "if not sha256:",
        ("tests/data/corpora_test.py",),
    ),
    "later frames of a file that are lost": Fault(
        "heinsen_jax/data/streams.py",
        'frame.unused_data if frame.eof else b""',
        'b""',
        ("tests/data/documents_test.py",),
    ),
    "an expansion of one block at a time": Fault(
        "heinsen_jax/data/streams.py",
        "self._size += count",
        "self._size = count",
        ("tests/data/streams_test.py",),
    ),
    "a shard of a bucket that is not verified": Fault(
        "heinsen_jax/data/fetch.py",
        "if sha256_of(aside) != shard.sha256:",
        "if not aside.exists():",
        ("tests/data/fetch_test.py",),
    ),
    "data of a bucket that have changed": Fault(
        "heinsen_jax/data/fetch.py",
        'folder = cache / f"{remote.name}-{joint_hash(content.decode())[:12]}"',
        "folder = cache / remote.name",
        ("tests/data/fetch_test.py",),
    ),
    "long texts of Parquet that are refused": Fault(
        "heinsen_jax/data/parquet.py",
        "tests = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view",
        "tests = pa.types.is_string, pa.types.is_string_view",
        ("tests/data/documents_test.py",),
    ),
    "names of sources with their commit": Fault(
        "heinsen_jax/data/hub.py",
        'r"^datasets/|@[^/]+"',
        'r"^datasets/"',
        ("tests/data/hub_test.py",),
    ),
    "a version of a tokenizer without its start tokens": Fault(
        "heinsen_jax/data/tokenizers.py",
        'return " ".join([tokenizer.fingerprint, *map(str, start_ids(tokenizer))])',
        "return tokenizer.fingerprint",
        ("tests/data/prepare_test.py",),
    ),
}

GENERATE_FAULTS = {
    "one candidate too many": Fault(
        "heinsen_jax/generate/sampling.py",
        "lax.top_k(logits, top_k)[0]",
        "lax.top_k(logits, min(top_k + 1, logits.shape[-1]))[0]",
        ("tests/generate/tokens_test.py",),
    ),
    "a nucleus without its last candidate": Fault(
        "heinsen_jax/generate/sampling.py",
        "jnp.cumsum(p, -1) - p < top_p",
        "jnp.cumsum(p, -1) <= top_p",
        ("tests/generate/tokens_test.py",),
    ),
    "random numbers that repeat": Fault(
        "heinsen_jax/generate/tokens.py",
        "keys = sampler.keys(position + index)",
        "keys = sampler.keys(position)",
        ("tests/generate/tokens_test.py",),
    ),
    "a prompt without its last token": Fault(
        "heinsen_jax/generate/prompts.py",
        "is_read = first + size <= lengths",
        "is_read = first + size < lengths",
        ("tests/generate/prompts_test.py",),
    ),
    "a text with its end token": Fault(
        "heinsen_jax/generate/text.py",
        "        if token in ends:\n            return\n        yield token",
        "        yield token\n        if token in ends:\n            return",
        ("tests/generate/text_test.py",),
    ),
    "a state of a model with other weights": Fault(
        "heinsen_jax/generate/states.py",
        "        digest.update(np.asarray(x).tobytes())\n",
        "",
        ("tests/generate/states_test.py",),
    ),
}

INTEROP_FAULTS = {
    "an export with a transposed matrix": Fault(
        "heinsen_jax/interop/torch.py",
        '("blocks.0.attention.output.kernel", True)',
        '("blocks.0.attention.output.kernel", False)',
        ("tests/interop/torch_test.py",),
    ),
    "a score of one token too many": Fault(
        "heinsen_jax/interop/harness.py",
        "counted = slice(end - len(pairs[number][1]), end)",
        "counted = slice(max(end - len(pairs[number][1]) - 1, 0), end)",
        ("tests/interop/harness_test.py",),
    ),
    "a start token that occurs twice": Fault(
        "heinsen_jax/interop/harness_texts.py",
        "return ids if ids[: len(start)] == start else [*start, *ids]",
        "return [*start, *ids]",
        ("tests/interop/harness_test.py",),
    ),
    "a window that is a token too short": Fault(
        "heinsen_jax/interop/harness_batches.py",
        "tokens[max(0, end - max_length - 1) : start]",
        "tokens[max(0, end - max_length) : start]",
        ("tests/interop/harness_batches_test.py",),
    ),
    "a folder of this machine in a published model": Fault(
        "heinsen_jax/interop/hub.py",
        "{plain(name): plain(x) for name, x in fields.items()}",
        "{name: plain(x) for name, x in fields.items()}",
        ("tests/interop/hub_test.py",),
    ),
    "rotated features in another order": Fault(
        "heinsen_jax/interop/transformers/tensors.py",
        "pairs = np.arange(self.rotated).reshape(2, -1).T.ravel()",
        "pairs = np.arange(self.rotated)",
        ("tests/interop/tensors_test.py",),
    ),
    "a bias that is left out": Fault(
        "heinsen_jax/interop/transformers/families.py",
        "return Variant(self.num_key_value_heads, self.head_dim, bias=True)",
        "return Variant(self.num_key_value_heads, self.head_dim)",
        ("tests/interop/families_test.py",),
    ),
    "two options of scaled positions exchanged": Fault(
        "heinsen_jax/interop/transformers/rope.py",
        '"low_freq_factor": "rotary_low_turns",\n        "high_freq_factor": "rotary_high_turns",',
        '"low_freq_factor": "rotary_high_turns",\n        "high_freq_factor": "rotary_low_turns",',
        ("tests/interop/families_test.py",),
    ),
    "an offset in numbers in place of bytes": Fault(
        "heinsen_jax/interop/pickled.py",
        "storage, offset * storage.itemsize, strides)",
        "storage, offset, strides)",
        ("tests/faults/pickled_test.py",),
    ),
    "query heads exported as key/value heads": Fault(
        "heinsen_jax/interop/transformers/matching.py",
        'getattr(layer, "num_kv_heads", None)',
        'getattr(layer, "num_heads", None)',
        ("tests/interop/families_test.py",),
    ),
}

STUDY_FAULTS = {
    "results with another text": Fault(
        "studies/runs.py",
        "if then[name] != now.get(name)",
        "if name not in now",
        ("tests/studies/runs_test.py",),
    ),
    "a p-value multiplied by all comparisons": Fault(
        "studies/differences.py",
        "(len(p_values) - index) * p_values[labels]",
        "len(p_values) * p_values[labels]",
        ("tests/studies/differences_test.py",),
    ),
    "a run that diverged as the best": Fault(
        "studies/results.py",
        "(x if math.isfinite(x) else -math.inf for x in values)",
        "(x if math.isfinite(x) else math.inf for x in values)",
        ("tests/studies/schedule_test.py",),
    ),
    "the last evaluation that reached a value": Fault(
        "studies/records.py",
        "return [min(steps, default=None) for steps in reached]",
        "return [max(steps, default=None) for steps in reached]",
        ("tests/studies/report_test.py",),
    ),
    "an exponent with the wrong sign": Fault(
        "studies/power_law.py",
        "exponent = -float(slope)",
        "exponent = float(slope)",
        ("tests/studies/power_law_test.py",),
    ),
    "a frontier of the worst results": Fault(
        "studies/points.py",
        "if not best or sign * result.mean(self.y) > sign * best[-1].mean(self.y):",
        "if not best or sign * result.mean(self.y) < sign * best[-1].mean(self.y):",
        ("tests/studies/plots_test.py",),
    ),
    "a first seed that is run twice": Fault(
        "studies/grid.py",
        "for seed in [*self.axes.get(self.seeds, {})][1:]]",
        "for seed in [*self.axes.get(self.seeds, {})]]",
        ("tests/studies/schedule_test.py",),
    ),
    "learning rates that do not decay": Fault(
        "studies/sweeps.py",
        '"optimizer.end_learning_rate": rate / 10',
        '"optimizer.end_learning_rate": rate',
        ("tests/studies/sweeps_test.py",),
    ),
    "stages with more updates than the budget": Fault(
        "studies/linearization.py",
        "steps=config.training.steps - first)",
        "steps=config.training.steps)",
        ("tests/studies/linearization_test.py",),
    ),
}

COMMANDS_FAULTS = {
    "a second stage without the first": Fault(
        "heinsen_jax/linearize/plan.py",
        "settings = replace(settings, start=folder)",
        "settings = replace(settings, start=None)",
        ("tests/linearize_test.py",),
    ),
    "a recall of what cannot be known": Fault(
        "heinsen_jax/linearize/comparison.py",
        "features[:, second:], tokens[:, second + 1 :]",
        "features[:, second - 1 :], tokens[:, second:]",
        ("tests/linearize_test.py",),
    ),
    "changed settings that are not noticed": Fault(
        "heinsen_jax/training/prepare.py",
        '("seed", "data", "optimizer", "distillation")',
        '("seed", "data", "distillation")',
        ("tests/config/load_test.py",),
    ),
    "an evaluation of training text": Fault(
        "heinsen_jax/evaluate.py",
        "return settings, own is None",
        "return settings, True",
        ("tests/evaluate_test.py",),
    ),
    "an unread token that a saved chat lacks": Fault(
        "heinsen_jax/chat.py",
        "unread = jnp.asarray(self.unread, jnp.int32)",
        "unread = jnp.asarray([], jnp.int32)",
        ("tests/faults/chat_test.py",),
    ),
    "a failed answer that stays in the conversation": Fault(
        "heinsen_jax/chat.py",
        "                self.position = before\n            raise",
        "                pass\n            raise",
        ("tests/faults/chat_test.py",),
    ),
    "a file that is uploaded before it is complete": Fault(
        "heinsen_jax/runs/folder.py",
        'if path.suffix == ".partial" or not path.is_file():',
        "if not path.is_file():",
        ("tests/runs/folder_test.py",),
    ),
    "files that are not published after an error": Fault(
        "heinsen_jax/runs/folder.py",
        "            with contextlib.suppress(UserError):\n                self.publish()\n",
        "",
        ("tests/runs/folder_test.py",),
    ),
    "a lock that its process gets twice": Fault(
        "heinsen_jax/storage/locks.py",
        "fallback_to_soft=False)",
        "fallback_to_soft=False, is_singleton=True)",
        ("tests/storage/locks_test.py",),
    ),
    "a lock that is not released": Fault(
        "heinsen_jax/storage/buckets.py",
        "        thread.join()\n        lock.release()",
        "        thread.join()",
        ("tests/storage/buckets_test.py",),
    ),
    "a batch that only one axis splits": Fault(
        "heinsen_jax/sharding.py",
        '"batch": ("data", "fsdp"),',
        '"batch": ("data",),',
        ("tests/sharding_test.py",),
    ),
    "a split that leaves a remainder": Fault(
        "heinsen_jax/sharding.py",
        "return found if found and size % math.prod(mesh.shape[x] for x in found) == 0 else None",
        "return found or None",
        ("tests/sharding_test.py",),
    ),
    "a setting that another process lacks": Fault(
        "heinsen_jax/runtime/distributed.py",
        "sorted(ours.keys() | theirs.keys())",
        "sorted(ours.keys() & theirs.keys())",
        ("tests/runtime/distributed_test.py",),
    ),
    "control characters in messages": Fault(
        "heinsen_jax/errors.py",
        "pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE",
        "pattern = _UNPRINTABLE_IN_LINES",
        ("tests/faults/messages_test.py",),
    ),
    "a user's cache that is replaced": Fault(
        "heinsen_jax/runtime/compilation.py",
        'if jax.config.values["jax_compilation_cache_dir"] is not None or jax.process_count() > 1:',
        "if jax.process_count() > 1:",
        ("tests/runtime/compilation_test.py",),
    ),
    "a user's allocator that is reconfigured": Fault(
        "heinsen_jax/runtime/allocator.py",
        'if chosen or sys.platform != "linux":',
        'if sys.platform != "linux":',
        ("tests/runtime/allocator_test.py",),
    ),
}

FAULTS: dict[str, Fault] = {
    **LOG_ATTENTION_FAULTS,
    **OPS_FAULTS,
    **ATTENTION_FAULTS,
    **MODELS_FAULTS,
    **TRAINING_FAULTS,
    **DATA_FAULTS,
    **GENERATE_FAULTS,
    **INTEROP_FAULTS,
    **STUDY_FAULTS,
    **COMMANDS_FAULTS,
}
