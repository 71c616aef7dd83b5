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
      others: files with the tests that run, if not the one that mirrors the module's name.
    """

    file: str
    right: str
    wrong: str
    others: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, ...]:
        """Files with the tests that run, from the root."""
        module = self.file.removeprefix("heinsen_jax/").removesuffix(".py")
        return self.others or (f"tests/{module}_test.py",)


LOG_ATTENTION_FAULTS = {
    "gradients that are compiled at every call": Fault(
        "heinsen_jax/ops/log_attention/call.py",
        "@jax.jit  # so that equal calls and gradients",
        "@partial(jax.jit, inline=True)  # so that equal calls and gradients",
        ("tests/attention/transforms_test.py",),
    ),
    "a mask off by one": Fault(
        "heinsen_jax/ops/log_attention/fast.py",
        "jnp.tri(size, dtype=bool)",
        "jnp.tri(size, k=-1, dtype=bool)",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a dropped decay": Fault(
        "heinsen_jax/ops/log_attention/fast.py",
        "key - so_far",
        "key",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a stale state": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "return (after, _write(outputs, block_outputs, index)), saved",
        "return (before, _write(outputs, block_outputs, index)), saved",
    ),
    "a stale cotangent": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "return (d_before, _write(d_inputs, d_block, index)), None",
        "return (d_after, _write(d_inputs, d_block, index)), None",
    ),
    "a tier beyond its range": Fault(
        "heinsen_jax/ops/log_attention/chunked.py",
        "first_safe((used - plan.budget)[None])",
        "first_safe((used - 2 * plan.budget)[None])",
    ),
    "a decay without its cotangent": Fault(
        "heinsen_jax/ops/log_attention/exact.py",
        "jnp.zeros_like(decay), d_from_start",
        "jnp.zeros_like(decay), jnp.zeros_like(d_from_start)",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a window off by one": Fault(
        "heinsen_jax/ops/log_attention/variants.py",
        "_shift(before.query, 1 - window)",
        "_shift(before.query, -window)",
        ("tests/ops/log_attention/keywords_test.py",),
    ),
    "states merged without decay": Fault(
        "heinsen_jax/ops/log_attention/state.py",
        "earlier = _decayed(self, other.log_decay)\n        merged = merge_averages",
        "earlier = self\n        merged = merge_averages",
    ),
    "padding that counts as tokens": Fault(
        "heinsen_jax/ops/log_attention/blocks.py",
        "return jnp.pad(x, widths, constant_values=-jnp.inf)",
        "return jnp.pad(x, widths)",
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
    "values taken for logarithms": Fault(
        "heinsen_jax/ops/log_attention/api.py",
        "is_log=False,",
        "is_log=True,",
    ),
    "segments that log-attention ignores": Fault(
        "heinsen_jax/ops/log_attention/api.py",
        "is_log=True,\n        is_causal=is_causal,\n        segment_ids=segment_ids,",
        "is_log=True,\n        is_causal=is_causal,\n        segment_ids=None,",
        ("tests/ops/context_test.py",),
    ),
    "padding of a chunk that is not masked": Fault(
        "heinsen_jax/ops/log_attention/inputs.py",
        "widths(inputs.key), constant_values=-jnp.inf)",
        "widths(inputs.key))",
    ),
    "a definition whose tokens do not attend to themselves": Fault(
        "heinsen_jax/ops/log_attention/reference.py",
        "tokens &= s <= t",
        "tokens &= s < t",
        ("tests/ops/log_attention/api_test.py",),
    ),
    "a definition whose window is off by one": Fault(
        "heinsen_jax/ops/log_attention/reference.py",
        "tokens &= s > t - window",
        "tokens &= s >= t - window",
        ("tests/ops/log_attention/keywords_test.py",),
    ),
    "scores that are divided by the head dimension": Fault(
        "heinsen_jax/ops/log_window/api.py",
        "scale = 1 / math.sqrt(max(key_depth, 1))",
        "scale = 1 / max(key_depth, 1)",
        ("tests/ops/log_window_test.py",),
    ),
    "a first state without decay": Fault(
        "heinsen_jax/ops/log_window/api.py",
        "has_decay=log_decay is not None)",
        "has_decay=False)",
        ("tests/ops/log_window_test.py",),
    ),
    "sources that the router of queries chooses": Fault(
        "heinsen_jax/attention/colt5.py",
        "self._route(x, self.source_router, self.config.num_sources)",
        "self._route(x, self.query_router, self.config.num_sources)",
        ("tests/attention/oracle_test.py",),
    ),
    "segments of all tokens on each device": Fault(
        "heinsen_jax/attention/devices.py",
        "replace(call, segment_ids=segment_ids, state=state)",
        "replace(call, state=state)",
    ),
    "results of tokens that are not split": Fault(
        "heinsen_jax/attention/explicit_mesh.py",
        "zip(names, split_axes(tokens), strict=False)",
        "zip(names, (), strict=False)",
    ),
    "steps in place of decays": Fault(
        "heinsen_jax/attention/gated_deltanet.py",
        "_, log_decay = self",
        "log_decay, _ = self",
        ("tests/attention/oracle_test.py",),
    ),
    "an output gate with another activation": Fault(
        "heinsen_jax/attention/kda.py",
        'gate_activation = "sigmoid"',
        'gate_activation = "silu"',
        ("tests/attention/oracle_test.py",),
    ),
    "a denominator bias that a layer ignores": Fault(
        "heinsen_jax/attention/l1.py",
        "denominator_bias=bias, **keywords",
        "**keywords",
        ("tests/attention/oracle_test.py",),
    ),
    "a far distance within the window": Fault(
        "heinsen_jax/attention/l1_sparse.py",
        "np.arange(1, 64)",
        "np.arange(64)",
        ("tests/attention/oracle_test.py",),
    ),
    "a feature map that a layer ignores": Fault(
        "heinsen_jax/attention/linear.py",
        "partial(linear_attention, feature_map=self.config.feature_map)",
        "partial(linear_attention)",
        ("tests/attention/oracle_test.py",),
    ),
    "values projected like keys": Fault(
        "heinsen_jax/attention/linformer.py",
        "linformer_attention(query, key, value, *projections)",
        "linformer_attention(query, key, value, *projections[:1] * 2)",
        ("tests/attention/oracle_test.py",),
    ),
    "padding before the tokens in place of after them": Fault(
        "heinsen_jax/attention/memory_compressed.py",
        'pad="right"',
        'pad="left"',
        ("tests/attention/states_test.py",),
    ),
    "a state of keys in place of their features": Fault(
        "heinsen_jax/attention/features.py",
        "sizes = self.num_kv_heads, self.num_features, self.value_depth",
        "sizes = self.num_kv_heads, self.key_depth, self.value_depth",
        ("tests/attention/states_test.py",),
    ),
    "random features of twice the norm": Fault(
        "heinsen_jax/attention/performer.py",
        "projection=features",
        "projection=2 * features",
        ("tests/attention/oracle_test.py",),
    ),
    "a name that stands for another mechanism": Fault(
        "heinsen_jax/attention/registry.py",
        '"gated_deltanet": GatedDeltaNetAttention,',
        '"gated_deltanet": DeltaNetAttention,',
        ("tests/faults/parameters_test.py",),
    ),
    "options of a mechanism that are dropped": Fault(
        "heinsen_jax/attention/registry.py",
        "configure(name, **config),",
        "configure(name),",
        ("tests/attention/softmax_test.py",),
    ),
    "a residual that is added twice": Fault(
        "heinsen_jax/attention/rmt.py",
        "return y - x.astype(y.dtype), state",
        "return y, state",
        ("tests/attention/oracle_test.py",),
    ),
    "a reach off by one": Fault(
        "heinsen_jax/attention/sliding_window.py",
        "return self.window_size - 1",
        "return self.window_size",
        ("tests/attention/oracle_test.py",),
    ),
    "a state of the highest power only": Fault(
        "heinsen_jax/attention/taylor.py",
        "math.comb(key_depth + terms, terms)",
        "math.comb(key_depth + terms - 1, terms)",
        ("tests/attention/states_test.py",),
    ),
}

OPS_FAULTS = {
    "coefficients aligned with chunks": Fault(
        "heinsen_jax/ops/linear_recurrence.py",
        "return expanded.astype(dtype)",
        "return a.astype(dtype)",
    ),
    "half of the derivative of equal scores": Fault(
        "heinsen_jax/ops/tiled.py",
        "share(jnp.where(scores > m, m, scores), m)",
        "share(jnp.minimum(scores, m), m)",
        ("tests/ops/softmax_test.py",),
    ),
    "steps of a token on two devices": Fault(
        "heinsen_jax/attention/devices.py",
        "array_specs = tuple(place((tokens",
        'array_specs = tuple(place(("tokens"',
    ),
    "a decay of any shape": Fault(
        "heinsen_jax/ops/log_attention/state.py",
        'check_array("log_decay", log_decay, (key.shape[:-1], key.shape), jnp.floating)',
        "pass",
    ),
    "equal terms whose number is lost to rounding": Fault(
        "heinsen_jax/ops/linear_recurrence.py",
        "(kept - scale) + previous(jnp.zeros_like(initial), log_rest), log_b - scale",
        "kept - scale, log_b - scale",
        ("tests/ops/log_attention/extremes_test.py",),
    ),
    "weights of a pair that sum to 2": Fault(
        "heinsen_jax/ops/numerics.py",
        "(x_exp / total, y_exp / total)",
        "(x_exp, y_exp)",
        ("tests/ops/log_attention/extremes_test.py",),
    ),
    "a segment that starts a token late": Fault(
        "heinsen_jax/ops/arguments.py",
        "[(1, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        "[(2, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        ("tests/ops/linear_test.py",),
    ),
    "symbolic sizes compared with limits": Fault(
        "heinsen_jax/ops/layout.py",
        "return not is_symbolic(size) and size <= limit",
        "return size <= limit",
        ("tests/ops/export_test.py",),
    ),
    "evaluations of whole batches": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "return rows // parts, None",
        "return rows, None",
        ("tests/training/held_out_test.py",),
    ),
    "changed data that are evaluated": Fault(
        "heinsen_jax/training/recorded.py",
        'return ours[""] not in recorded.values()',
        "return not recorded",
        ("tests/training/held_out_test.py",),
    ),
    "weights of a mixture that are truncated": Fault(
        "heinsen_jax/data/mixture.py",
        "round(100 * weight / smallest)",
        "int(100 * weight / smallest)",
    ),
    "tokens that are absorbed in half precision": Fault(
        "heinsen_jax/ops/log_attention/state.py",
        "dtype = wide(*(jnp.finfo(x.dtype).dtype for x in jax.tree.leaves(given)))",
        "dtype = key.dtype",
    ),
    "tiles of a window that are not visited": Fault(
        "heinsen_jax/ops/masks.py",
        "return [(first - self.before, last + self.after)]",
        "return [(first, last + self.after)]",
    ),
    "a token that a model lacks": Fault(
        "heinsen_jax/data/tokenizer_files.py",
        'x["id"] >= vocab_size',
        'x["id"] > vocab_size',
        ("tests/data/tokenizer_pretrained_test.py",),
    ),
    "dtypes that strict promotion refuses": Fault(
        "heinsen_jax/typing.py",
        'with jax.numpy_dtype_promotion("standard"):\n        return jnp.result_type(*given)',
        "return jnp.result_type(*given)",
        ("tests/goom/numbers_test.py",),
    ),
    "static fields missing in exported functions": Fault(
        "heinsen_jax/typing.py",
        "json.dumps(constants).encode()",
        'json.dumps(["?"] * len(constants)).encode()',
    ),
    "a swapped axis": Fault(
        "heinsen_jax/ops/layout.py",
        "x.reshape(chunks, folds // groups, groups, heads, rows // heads, features)",
        "x.reshape(chunks, folds // groups, groups, rows // heads, heads, features).swapaxes(3, 4)",
        ("tests/ops/linear_test.py",),
    ),
    "a cotangent left out": Fault(
        "heinsen_jax/ops/numerics.py",
        "tuple(d - d_log_z for d in d_parts)",
        "tuple(d_parts)",
        ("tests/ops/log_attention/chunked_test.py",),
    ),
    "a choice by the mildest row of a batch": Fault(
        "heinsen_jax/ops/choice.py",
        "first_safe(jnp.max(excess, 0, initial=0))",
        "first_safe(jnp.min(excess, 0, initial=0))",
    ),
    "a causal mask of softmax off by one": Fault(
        "heinsen_jax/ops/masks.py",
        "return key <= query",
        "return key < query",
        ("tests/ops/softmax_test.py",),
    ),
    "an offset of queries that is ignored": Fault(
        "heinsen_jax/ops/softmax.py",
        "rule(offset + positions[0][:, None]",
        "rule(positions[0][:, None]",
    ),
    "totals of averages in one float": Fault(
        "heinsen_jax/ops/pooling.py",
        "    return WeightedTokens(x, largest, total)\n\n\ndef _pool(",
        "    both = WeightedTokens(x, largest, total)\n"
        "    return weighted(both.x, both.log_weight)\n\n\ndef _pool(",
        ("tests/ops/additive_test.py",),
    ),
    "outputs of another dtype than the layer's": Fault(
        "heinsen_jax/attention/base.py",
        "y = y.astype(x.dtype if self.dtype is None else self.dtype)",
        "y = y.astype(x.dtype)",
        ("tests/attention/conformance_test.py",),
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
    ),
    "a stabilizer one token late": Fault(
        "heinsen_jax/ops/mlstm.py",
        "jnp.exp(-m[..., 1:, :])",
        "jnp.exp(-m[..., :-1, :])",
    ),
    "a token counted twice in both directions": Fault(
        "heinsen_jax/ops/linear.py",
        "jax.tree.map(jnp.zeros_like, state), attends_to_itself=False)",
        "jax.tree.map(jnp.zeros_like, state))",
    ),
    "a decay to the end that includes the token's own": Fault(
        "heinsen_jax/ops/linear_recurrence.py",
        "later = jnp.concatenate([steps[1:], jnp.zeros_like(steps[:1])])",
        "later = steps",
    ),
    "a window of averages off by one": Fault(
        "heinsen_jax/ops/pooling.py",
        "age < window",
        "age <= window",
        ("tests/ops/additive_test.py",),
    ),
    "a window of weights off by one": Fault(
        "heinsen_jax/ops/additive.py",
        "visible &= age < window",
        "visible &= age <= window",
    ),
    "a mesh axis that is read by letter": Fault(
        "heinsen_jax/ops/devices.py",
        "for names in names_by_axis(spec) for name in names}",
        "for names in spec if names for name in names}",
        ("tests/multi_device/explicit_test.py",),
    ),
    "keys that stay whole where queries are split": Fault(
        "heinsen_jax/ops/devices.py",
        "for axis in (HEADS, GROUPS) if heads",
        "for axis in (HEADS,) if heads",
    ),
    "routed tokens without their weights": Fault(
        "heinsen_jax/ops/colt5.py",
        "_routed(x, key_value_routing).astype(weights.dtype) * weights",
        "_routed(x, key_value_routing).astype(weights.dtype)",
    ),
    "a denominator bias that is ignored": Fault(
        "heinsen_jax/ops/l1.py",
        "        denominator_bias,\n        *_sizes",
        "        0.0,\n        *_sizes",
    ),
    "a gradient of keys with the wrong sign": Fault(
        "heinsen_jax/ops/l1_sparse.py",
        "_put(sums[1], source, -d)",
        "_put(sums[1], source, d)",
    ),
    "the last rows of a projection for a short sequence": Fault(
        "heinsen_jax/ops/linformer.py",
        "projection = projection[..., :sources, :]",
        "projection = projection[..., -sources:, :]",
    ),
    "a group that is visible before it is complete": Fault(
        "heinsen_jax/ops/memory_compressed.py",
        "return key * self.size - 1 <= query",
        "return (key - 1) * self.size <= query",
    ),
    "a scale without the rotary features": Fault(
        "heinsen_jax/ops/mla.py",
        "scale = 1 / math.sqrt(max(depth + query_pe.shape[-1], 1))",
        "scale = 1 / math.sqrt(max(depth, 1))",
    ),
    "random features of keys without their norm": Fault(
        "heinsen_jax/ops/performer.py",
        "log_key = _plus(log_key - key_norm, epsilon)",
        "log_key = _plus(log_key, epsilon)",
    ),
    "a memory that is not written": Fault(
        "heinsen_jax/ops/rmt.py",
        "written = lax.dynamic_slice_in_dim(y, end, size, -2)",
        "written = lax.dynamic_slice_in_dim(y, 0, size, -2)",
    ),
    "a rotation in the other direction": Fault(
        "heinsen_jax/ops/rotary.py",
        "[first * cos - second * sin, first * sin + second * cos]",
        "[first * cos + second * sin, second * cos - first * sin]",
    ),
    "a scale that is squared": Fault(
        "heinsen_jax/ops/taylor.py",
        "scale ** (power / 2)",
        "scale**power",
    ),
    "a radius off by one": Fault(
        "heinsen_jax/ops/tglobal.py",
        "(offset >= -radius)",
        "(offset > -radius)",
    ),
    "a shard boundary that no segment crosses": Fault(
        "heinsen_jax/ops/context.py",
        "before = jnp.concatenate([first[:1], last[:-1]])",
        "before = jnp.concatenate([first[:1], first[:-1]])",
    ),
    "a segment that continues the one before it": Fault(
        "heinsen_jax/ops/context.py",
        "before = _where(continues, after, cut)",
        "before = after",
    ),
    "own tokens that count twice": Fault(
        "heinsen_jax/ops/context.py",
        "visible = _where(device == index, visible, visible.merge(state))",
        "visible = visible.merge(state)",
    ),
}

ATTENTION_FAULTS = {
    "an undeclared capability that is not checked": Fault(
        "heinsen_jax/attention/base.py",
        '"segments": segment_ids is not None,',
        '"segments": False,',
    ),
    "a cache that tells the position after new tokens": Fault(
        "heinsen_jax/attention/cache.py",
        "return TokenCache(arrays, start + count), start",
        "return TokenCache(arrays, start + count), start + count",
    ),
    "an empty slot of a window that counts": Fault(
        "heinsen_jax/attention/cache.py",
        "jnp.maximum(self.size - self.num_tokens, 0)",
        "jnp.maximum(self.size - self.num_tokens - 1, 0)",
    ),
    "a state of a window that is too short": Fault(
        "heinsen_jax/attention/dilated.py",
        "return (self.window_size - 1) * self.dilation",
        "return self.window_size - 1",
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
        "positions = start + jnp.arange(",
        "positions = jnp.arange(",
        ("tests/attention/cache_test.py",),
    ),
    "a global token that is part of the window, too": Fault(
        "heinsen_jax/attention/cache.py",
        "near = (place >= count)[None] & (at",
        "near = (place >= 0)[None] & (at",
    ),
    "later tokens that are not global": Fault(
        "heinsen_jax/attention/longformer.py",
        "is_global = before + jnp",
        "is_global = 0 * before + jnp",
        ("tests/attention/cache_test.py",),
    ),
    "scaled and unscaled frequencies exchanged": Fault(
        "heinsen_jax/attention/rotary.py",
        "unchanged * unscaled + (1 - unchanged) * scaled",
        "unchanged * scaled + (1 - unchanged) * unscaled",
    ),
    "slopes of ALiBi from head 0": Fault(
        "heinsen_jax/attention/softmax.py",
        "heads = np.arange(1, self.num_heads + 1)",
        "heads = np.arange(self.num_heads)",
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
    ),
    "biases with weight decay": Fault(
        "heinsen_jax/attention/parameters.py",
        '{"logical_axes": logical_axes[1:], "kind": "vector"}',
        '{"logical_axes": logical_axes[1:], "kind": "matrix"}',
        ("tests/training/optimizer_test.py",),
    ),
    "initial decays with the wrong sign": Fault(
        "heinsen_jax/attention/parameters.py",
        "layer.bias[...] = jnp.log(timescales)",
        "layer.bias[...] = -jnp.log(timescales)",
        ("tests/attention/log_test.py",),
    ),
    "a wrong initial scale": Fault(
        "heinsen_jax/attention/log.py",
        "INITIAL_SCALE = 2.0",
        "INITIAL_SCALE = 1.0",
    ),
    "a convolution that restarts": Fault(
        "heinsen_jax/attention/matrix_state.py",
        "before = None if call.state is None else call.state.convolutions[index]",
        "before = None",
    ),
    "a convolution whose state is a token old": Fault(
        "heinsen_jax/attention/convolution.py",
        "return parts, together[..., length:, :]",
        "return parts, together[..., length - 1 : -1, :]",
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
    "shares up to 2 without negative eigenvalues": Fault(
        "heinsen_jax/attention/gated_deltanet2.py",
        "erase = 2 * erase if self.config.negative_eigenvalues else erase",
        "erase = 2 * erase",
        ("tests/attention/matrix_state_test.py",),
    ),
    "steps that are not counted": Fault(
        "heinsen_jax/attention/gated_deltaproduct.py",
        "(1 + 2 * self.num_steps) / 3",
        "1.0",
        ("tests/attention/flops_test.py",),
    ),
    "a state that is read after its decay": Fault(
        "heinsen_jax/attention/rwkv7.py",
        "erased * jnp.exp(-log_decay)",
        "erased",
        ("tests/attention/oracle_test.py",),
    ),
    "a short convolution that begins again with each chunk": Fault(
        "heinsen_jax/attention/short_convolution.py",
        '{"state": call.state,',
        '{"state": None,',
        ("tests/attention/matrix_state_test.py",),
    ),
    "FLOPs of a dense recurrence counted twice": Fault(
        "heinsen_jax/attention/goom_ssm.py",
        "return 2.0 * num_heads",
        "return 4.0 * num_heads",
        ("tests/attention/flops_test.py",),
    ),
    "a segment that begins with the state before it": Fault(
        "heinsen_jax/goom/recurrence.py",
        "jnp.where(is_start, x, y)",
        "jnp.where(is_start, y, y)",
    ),
    "queries of the source": Fault(
        "heinsen_jax/attention/heads.py",
        "query = self._part(x, apart,",
        "query = self._part(source, apart,",
    ),
    "a mask of queries taken for one of keys": Fault(
        "heinsen_jax/attention/flax_fn.py",
        "if (mask == key_mask).all():",
        "if (mask == key_mask).any():",
    ),
    "importance weights without their window": Fault(
        "heinsen_jax/attention/additive.py",
        "first, second = (additive_weights(x, local_window_size=window) for x in logits)",
        "first, second = (additive_weights(x) for x in logits)",
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
        "return self.block_size - 1 if",
        "return self.block_size - 2 if",
        ("tests/attention/states_test.py",),
    ),
    "queries at the first slot of a window": Fault(
        "heinsen_jax/attention/softmax_base.py",
        "query_offset=state.size,",
        "query_offset=0,",
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
        "inputs = before_attention if self.is_parallel else x",
        "inputs = x",
        ("tests/models/parts_test.py",),
    ),
    "a token id past the vocabulary": Fault(
        "heinsen_jax/models/language_model.py",
        "if low < 0 or high >= vocab_size:",
        "if low < 0 or high > vocab_size:",
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
    ),
    "FLOPs without the backward pass": Fault(
        "heinsen_jax/models/flops.py",
        "return 6.0 * parameters",
        "return 2.0 * parameters",
        ("tests/models/language_model_test.py",),
    ),
    "a pattern without its repeats": Fault(
        "heinsen_jax/models/pattern.py",
        "for x in named for _ in range(x.repeats))",
        "for x in named)",
    ),
    "a soft cap that shrinks all logits": Fault(
        "heinsen_jax/models/readout.py",
        "logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)",
        "logits = jnp.tanh(logits / self.soft_cap)",
        ("tests/models/parts_test.py",),
    ),
}

TRAINING_FAULTS = {
    "a checkpoint that is due and not saved": Fault(
        "heinsen_jax/training/loop.py",
        "every is not None and step % every == 0",
        "every is not None and step % every == 1",
        ("tests/faults/lost_test.py",),
    ),
    "a missing name whose package is not named": Fault(
        "heinsen_jax/runtime/lazy.py",
        'AttributeError(f"module {package!r} has no attribute {name!r}")',
        "AttributeError(name)",
        ("tests/package_test.py",),
    ),
    "a range that integers of JAX do not have": Fault(
        "heinsen_jax/config/load.py",
        "limit = 2**32 if name",
        "limit = 2**63 if name",
        ("tests/training/prepare_test.py",),
    ),
    "a stage 2 that may not fit into memory": Fault(
        "heinsen_jax/linearize/run.py",
        "_fit(stage, prepared, overrides)\n            for",
        "pass\n            for",
        ("tests/linearize_test.py",),
    ),
    "overrides of a linearization that are ignored": Fault(
        "heinsen_jax/linearize/__main__.py",
        "return package.linearize(options, overrides)",
        "return package.linearize(options)",
        ("tests/linearize_test.py",),
    ),
    "packing of documents that are not separate": Fault(
        "heinsen_jax/objectives/documents.py",
        'if data.documents is not None or data.packing == "best_fit":',
        "if data.documents is not None:",
        ("tests/training/documents_test.py",),
    ),
    "a damaged last row that is not reported": Fault(
        "heinsen_jax/runs/metrics_file.py",
        'elif number < len(lines) or line.endswith(b"\\n"):',
        "elif number < len(lines):",
        ("tests/training/metrics_test.py",),
    ),
    "a checkpoint of transformers that is a run": Fault(
        "heinsen_jax/runs/record.py",
        'isinstance(config, dict) and "model_type" in config',
        'isinstance(config, dict) and "model_types" in config',
        ("tests/linearize_test.py",),
    ),
    "a best checkpoint that is removed": Fault(
        "heinsen_jax/training/checkpoint.py",
        "AnyPreservationPolicy([LatestN(keep), best])",
        "LatestN(keep)",
    ),
    "fields of a section that are lost": Fault(
        "heinsen_jax/training/config.py",
        "if isinstance(fields, dict):",
        "if not isinstance(fields, dict):",
        ("tests/config/load_test.py",),
    ),
    "an event of a killed run that is kept": Fault(
        "heinsen_jax/training/event_file.py",
        "if event.step <= step or",
        "if event.step <= step + 1 or",
        ("tests/training/metrics_test.py",),
    ),
    "a plot of rows without a loss": Fault(
        "heinsen_jax/training/loss_plot.py",
        " for row in rows if name in row]",
        " for row in rows]",
        ("tests/training/metrics_test.py",),
    ),
    "a utilization of an unknown peak": Fault(
        "heinsen_jax/training/utilization.py",
        "if peak is None or flops_per_token is None:",
        "if peak is None and flops_per_token is None:",
        ("tests/training/metrics_test.py",),
    ),
    "a name of training that is missing": Fault(
        "heinsen_jax/training/__init__.py",
        '    "resolve_settings",\n',
        "",
        ("tests/package_test.py",),
    ),
    "a learning rate one step ahead": Fault(
        "heinsen_jax/training/optimizer.py",
        "jnp.arange(steps))",
        "jnp.arange(1, steps + 1))",
    ),
    "weight decay of scales": Fault(
        "heinsen_jax/training/optimizer.py",
        'lambda kind: kind != "vector"',
        'lambda kind: kind != "embedding"',
    ),
    "an average of the weights that is not updated": Fault(
        "heinsen_jax/training/step.py",
        "old + rate * (new - old)",
        "old",
    ),
    "gradients of a sum in place of a mean": Fault(
        "heinsen_jax/training/step.py",
        "jax.tree.map(lambda x: in_float32(x) / count, gradients)",
        "jax.tree.map(in_float32, gradients)",
    ),
    "a skipped update that is not a step": Fault(
        "heinsen_jax/training/step.py",
        "return TrainState(state.step + 1,",
        "return TrainState(state.step + is_good,",
    ),
    "skips that add up over a whole run": Fault(
        "heinsen_jax/training/guard.py",
        "jnp.where(is_good, 0, self.consecutive_skips + 1)",
        "self.consecutive_skips + ~is_good",
        ("tests/training/step_test.py",),
    ),
    "additions that are dropped": Fault(
        "heinsen_jax/models/conversion.py",
        "        source = without_lora(source)",
        "        pass",
        ("tests/training/start_test.py",),
    ),
    "random layers that LoRA would freeze": Fault(
        "heinsen_jax/training/start.py",
        "model.lora_rank is not None and lacking",
        "False",
    ),
    "the best checkpoint of other data": Fault(
        "heinsen_jax/runs/checkpoints.py",
        '-math.inf if metrics.get("step", 0) <= self._changed_at else score(metrics)',
        "score(metrics)",
        ("tests/training/checkpoint_test.py",),
    ),
    "random weights in place of given ones": Fault(
        "heinsen_jax/training/state.py",
        "given.get(name, x).astype(x.dtype)",
        "x",
    ),
    "a loss over tokens that were not masked": Fault(
        "heinsen_jax/objectives/objective.py",
        "targets, drawn & loss_mask)",
        "targets, loss_mask)",
    ),
    "a z-loss that is not squared": Fault(
        "heinsen_jax/objectives/cross_entropy.py",
        "jax.nn.logsumexp(logits, -1) ** 2",
        "jax.nn.logsumexp(logits, -1)",
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
    ),
    "a bucket of positions off by one": Fault(
        "heinsen_jax/objectives/loss_by_position.py",
        'side="right"',
        'side="left"',
    ),
    "an evaluation of the last batch alone": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "[old + new for old, new",
        "[new for old, new",
    ),
    "sums of evaluations in float32": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "added = [np.asarray(new, np.float64) for new in added]",
        "added = [*added]",
    ),
    "bits per token in place of bits per byte": Fault(
        "heinsen_jax/objectives/evaluation.py",
        "average.loss / math.log(2) / size",
        "average.loss / math.log(2)",
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
    ),
    "metrics of the resumed step that are lost": Fault(
        "heinsen_jax/training/metrics.py",
        'if row["step"] <= start_step]',
        'if row["step"] < start_step]',
    ),
    "metrics that are not flushed": Fault(
        "heinsen_jax/training/metrics.py",
        "            self._file.flush()\n",
        "",
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
    ),
    "a thread that outlives its iterator": Fault(
        "heinsen_jax/runtime/timeouts.py",
        "    finally:\n        worker.end()",
        "    finally:\n        pass",
    ),
    "an error of a call that ends its thread": Fault(
        "heinsen_jax/runtime/worker.py",
        "except BaseException as error:",
        "except OSError as error:",
    ),
    "a tracked run that is not resumed": Fault(
        "heinsen_jax/training/trackers.py",
        "replace(run, id=ids.get(tracker.name))",
        "replace(run, id=None)",
    ),
    "free memory without the page cache": Fault(
        "heinsen_jax/training/memory.py",
        "limit - used + cached",
        "limit - used",
        ("tests/faults/memory_test.py",),
    ),
    "a model without an id for the mask": Fault(
        "heinsen_jax/training/settings.py",
        "if model.vocab_size == (vocabulary := dataset.vocab_size):",
        "if model.vocab_size < (vocabulary := dataset.vocab_size):",
        ("tests/training/prepare_test.py",),
    ),
    "data that resume a step early": Fault(
        "heinsen_jax/training/program.py",
        "start_step=start,\n            process_index",
        "start_step=max(start - 1, 0),\n            process_index",
        ("tests/training/loop_test.py",),
    ),
    "a cause of an error that is not considered": Fault(
        "heinsen_jax/runs/storage_errors.py",
        "causes = [error, error.__cause__, error.__context__]",
        "causes = [error]",
    ),
    "a device out of memory taken for a full disk": Fault(
        "heinsen_jax/runs/storage_errors.py",
        "if isinstance(error, jax.errors.JaxRuntimeError) or not isinstance(error, Exception):",
        "if not isinstance(error, Exception):",
    ),
    "a warning of few epochs": Fault(
        "heinsen_jax/training/preflight.py",
        " if x > MANY_EPOCHS)",
        ")",
        ("tests/training/loop_test.py",),
    ),
    "epochs of a mixture as a whole": Fault(
        "heinsen_jax/training/preflight.py",
        "return dataset.epochs(data, training.steps)",
        "dataset.epochs(data, training.steps)",
        ("tests/training/loop_test.py",),
    ),
    "a trace that is not stopped after the last step": Fault(
        "heinsen_jax/training/profiling.py",
        " in self.STEPS and not last",
        " in self.STEPS",
    ),
    "a tracked run that starts again": Fault(
        "heinsen_jax/training/tracker_services.py",
        'resume="never" if run.id is None else "must"',
        'resume="never"',
    ),
    "a missing extra without the field that needs it": Fault(
        "heinsen_jax/training/tracker_services.py",
        'raise UserError(f"training.trackers: {missing}") from missing',
        "raise",
    ),
}

DATA_FAULTS = {
    "a prediction across two documents": Fault(
        "heinsen_jax/data/packing.py",
        "is_token & (ids[1:] == ids[:-1])",
        "is_token",
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
    ),
    "a last batch that is lost": Fault(
        "heinsen_jax/data/pipeline.py",
        "count = math.ceil(len(rows) / config.batch_size)",
        "count = len(rows) // config.batch_size",
    ),
    "a stage of a mixture that begins a row late": Fault(
        "heinsen_jax/data/mixture.py",
        "stage = bisect.bisect_right(begins, number) - 1",
        "stage = max(bisect.bisect_left(begins, number) - 1, 0)",
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
    ),
    "a column of texts that is ignored": Fault(
        "heinsen_jax/data/documents.py",
        "isinstance(text := row.get(column), str)",
        'isinstance(text := row.get("text"), str)',
    ),
    "a missing fsync": Fault(
        "heinsen_jax/storage/files.py",
        "            os.fsync(file.fileno())\n",
        "",
    ),
    "a missing flush": Fault(
        "heinsen_jax/storage/files.py",
        "            file.flush()\n",
        "",
    ),
    "an id that does not fit its type": Fault(
        "heinsen_jax/data/manifest.py",
        '"uint16" if vocab_size <= 2**16 else "uint32"',
        '"uint16" if vocab_size <= 2**16 + 1 else "uint32"',
    ),
    "validation text in training": Fault(
        "heinsen_jax/data/units.py",
        'yield "train", document.text[:cut]',
        'yield "train", document.text',
        ("tests/data/prepare_test.py",),
    ),
    "options chosen by the test split": Fault(
        "studies/results.py",
        "values = sign * metrics.get(study.selection_metric, math.nan)",
        "values = sign * metrics.get(study.metric, math.nan)",
        ("tests/studies/runner_test.py",),
    ),
    "validation metrics in place of test metrics": Fault(
        "studies/runs.py",
        '        split="test",\n',
        "",
        ("tests/studies/runner_test.py",),
    ),
    "validation text in tests": Fault(
        "heinsen_jax/data/units.py",
        "if fraction <= number < fraction + self.test_fraction:",
        "if number < fraction + self.test_fraction:",
        ("tests/data/prepare_test.py",),
    ),
    "a preparation that begins again": Fault(
        "heinsen_jax/data/prepare.py",
        "left = [unit for unit in units if read_record(unit, output) is None]",
        "left = units",
    ),
    "special tokens found in a text": Fault(
        "heinsen_jax/data/tokenizer_json.py",
        "tokenizer.encode_special_tokens = True",
        "tokenizer.encode_special_tokens = False",
    ),
    "a start token that is dropped": Fault(
        "heinsen_jax/data/tokenizer_pretrained.py",
        "start = tuple(encoding.ids[: is_added.index(0)]) if 0 in is_added else ()",
        "start = ()",
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
        'if document.split in (None, "train"):',
        "if document:",
    ),
    "an answer that is the query": Fault(
        "heinsen_jax/data/tasks.py",
        "tokens[length] = tokens[place + 1]",
        "tokens[length] = tokens[place]",
    ),
    "validation examples that are trained on": Fault(
        "heinsen_jax/data/tasks.py",
        "_example(self._task, (self._stream,), index)",
        "_example(self._task, (0, 0), index)",
    ),
    "permutations composed in the other order": Fault(
        "heinsen_jax/data/groups.py",
        "number[tuple(a[i] for i in b)] for b",
        "number[tuple(b[i] for i in a)] for b",
        ("tests/data/tasks_test.py",),
    ),
    "a test split used for validation": Fault(
        "heinsen_jax/data/sources.py",
        '{"train": "train", "test": "test"}',
        '{"train": "train"}',
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
    ),
    "a shard of a bucket that is not verified": Fault(
        "heinsen_jax/data/fetch.py",
        "if sha256 not in (None, digest.hexdigest()):",
        "if not digest:",
    ),
    "data of a bucket that have changed": Fault(
        "heinsen_jax/data/fetch.py",
        'folder = cache / f"{remote.name}-{joint_hash(content.decode())[:12]}"',
        "folder = cache / remote.name",
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
    ),
    "no start tokens": Fault(
        "heinsen_jax/data/tokenizer_protocol.py",
        'getattr(tokenizer, "start_ids", ())',
        "()",
        ("tests/data/prepare_test.py",),
    ),
    "a version of a tokenizer without its start tokens": Fault(
        "heinsen_jax/data/tokenizers.py",
        'return " ".join([tokenizer.fingerprint, *map(str, start_ids(tokenizer))])',
        "return tokenizer.fingerprint",
        ("tests/data/prepare_test.py",),
    ),
    "a time limit that outlives its answer": Fault(
        "heinsen_jax/data/chat_template.py",
        "            finally:\n                timer.cancel()\n",
        "            finally:\n",
    ),
    "messages that refer to themselves": Fault(
        "heinsen_jax/data/chat_template.py",
        "except (TypeError, ValueError, RecursionError) as error:",
        "except TypeError as error:",
    ),
    "templates that may change messages": Fault(
        "heinsen_jax/data/chat_template_worker.py",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "from jinja2.sandbox import SandboxedEnvironment as ImmutableSandboxedEnvironment",
        ("tests/data/tokenizer_pretrained_test.py",),
    ),
    "a mixture whose weights are all 0": Fault(
        "heinsen_jax/data/config.py",
        "if not sum(weights.values()) > 0:",
        "if not weights:",
        ("tests/data/mixture_test.py",),
    ),
    "a tokenizer whose path is relative on other nodes": Fault(
        "heinsen_jax/data/config.py",
        "tokenizer=self.tokenizer if has_name(self.tokenizer) else absolute_path(self.tokenizer),",
        "tokenizer=self.tokenizer,",
        ("tests/studies/runner_test.py",),
    ),
    "tests as a part of the standard library": Fault(
        "heinsen_jax/data/corpora.py",
        '"test", "tests", "idle_test"',
        '"test", "idle_test"',
    ),
    "a function that data lack": Fault(
        "heinsen_jax/data/__init__.py",
        '    "load",\n',
        "",
        ("tests/package_test.py",),
    ),
    "an input without text that is accepted": Fault(
        "heinsen_jax/data/inputs.py",
        "if not sources[name]:",
        "if not sources:",
        ("tests/data/prepare_test.py",),
    ),
}

GENERATE_FAULTS = {
    "one candidate too many": Fault(
        "heinsen_jax/generate/sampling.py",
        "lax.top_k(undivided, top_k)[0]",
        "lax.top_k(undivided, min(top_k + 1, logits.shape[-1]))[0]",
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
        "draw(sampler, logits, position + index)",
        "draw(sampler, logits, position)",
    ),
    "a prompt without its last token": Fault(
        "heinsen_jax/generate/engine.py",
        "ends - done >= max(size, 1)",
        "ends - done > max(size, 1)",
    ),
    "rows that are fed beyond their prompts": Fault(
        "heinsen_jax/generate/engine.py",
        "if np.all(is_fed):",
        "if True:",
    ),
    "layers in another order": Fault(
        "heinsen_jax/generate/compiled.py",
        "tuple(chain.from_iterable(by_repeat))",
        "tuple(chain.from_iterable([*by_repeat][::-1]))",
        ("tests/generate/engine_test.py",),
    ),
    "left padding that is taken for right padding": Fault(
        "heinsen_jax/generate/prompts.py",
        'if padding == "left":',
        "if False:",
    ),
    "a text with its end token": Fault(
        "heinsen_jax/generate/text.py",
        "        if token in ends:\n            return\n        yield token",
        "        yield token\n        if token in ends:\n            return",
    ),
    "a state of a model with other weights": Fault(
        "heinsen_jax/generate/states.py",
        "            digest.update(np.asarray(x).tobytes())\n",
        "            pass\n",
    ),
    "a seed that is ignored": Fault(
        "heinsen_jax/generate/__main__.py",
        "jax.random.key(options.seed)",
        "jax.random.key(0)",
        ("tests/train_test.py",),
    ),
    "control characters of a model on a terminal": Fault(
        "heinsen_jax/generate/options.py",
        "print(printable(text, lines=True), end",
        "print(text, end",
        ("tests/faults/chat_test.py",),
    ),
}

INTEROP_FAULTS = {
    "an export with a transposed matrix": Fault(
        "heinsen_jax/interop/torch.py",
        '("layers.{}.feedforward2.2", DENSE)',
        '("layers.{}.feedforward2.2", SAME)',
    ),
    "a score of one token too many": Fault(
        "heinsen_jax/interop/harness.py",
        "counted = slice(end - len(pairs[number][1]), end)",
        "counted = slice(max(end - len(pairs[number][1]) - 1, 0), end)",
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
    ),
    "a folder of this machine in a published model": Fault(
        "heinsen_jax/interop/hub.py",
        "{plain(name): plain(x) for name, x in fields.items()}",
        "{name: plain(x) for name, x in fields.items()}",
    ),
    "rotated features in another order": Fault(
        "heinsen_jax/interop/tensors.py",
        "pairs = np.arange(self.rotated).reshape(2, -1).T.ravel()",
        "pairs = np.arange(self.rotated)",
    ),
    "every third layer in place of every fourth": Fault(
        "heinsen_jax/interop/transformers/hybrids.py",
        "(layer + 1) % interval",
        "layer % interval",
        ("tests/interop/families_test.py",),
    ),
    "a multiplier that is left out": Fault(
        "heinsen_jax/interop/transformers/family.py",
        "return self.attention_multiplier",
        "return super().scale",
        ("tests/interop/families_test.py",),
    ),
    "windows with the base of the other layers": Fault(
        "heinsen_jax/interop/transformers/windows.py",
        "Rope(rope_theta=self.rope_local_base_freq)",
        "Rope(rope_theta=self.rope.rope_theta)",
        ("tests/interop/families_test.py",),
    ),
    "positions in the fourth layer": Fault(
        "heinsen_jax/interop/transformers/families.py",
        "int((i + 1) % interval != 0)",
        "int(i % interval != 0)",
        ("tests/interop/families_test.py",),
    ),
    "filters of another part": Fault(
        "heinsen_jax/interop/transformers/names.py",
        "rows_of(2 - index, _convolved, layout)",
        "rows_of(index, _convolved, layout)",
        ("tests/interop/transformers_test.py",),
    ),
    "an MLP of twice its width": Fault(
        "heinsen_jax/interop/transformers/hybrids.py",
        "width = 2 * width // 3",
        "width = 2 * width",
        ("tests/interop/families_test.py",),
    ),
    "a bias that is left out": Fault(
        "heinsen_jax/interop/transformers/family.py",
        "self.has_bias or bias",
        "bias",
        ("tests/interop/families_test.py",),
    ),
    "two options of scaled positions exchanged": Fault(
        "heinsen_jax/interop/transformers/rope.py",
        '"low_freq_factor": "rotary_low_turns",\n        "high_freq_factor": "rotary_high_turns",',
        '"low_freq_factor": "rotary_high_turns",\n        "high_freq_factor": "rotary_low_turns",',
        ("tests/interop/families_test.py",),
    ),
    "rotated features in the order of the file": Fault(
        "heinsen_jax/interop/transformers/gguf.py",
        "pairs.swapaxes(1, 2).reshape(value.shape)",
        "pairs.reshape(value.shape)",
        ("tests/interop/gguf_test.py",),
    ),
    "merges with the lowest scores first": Fault(
        "heinsen_jax/interop/transformers/gguf_tokenizer.py",
        "(-score, i,",
        "(score, i,",
        ("tests/interop/gguf_test.py",),
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
    "a temperature of 0 that samples": Fault(
        "heinsen_jax/interop/harness_options.py",
        'if not settings["do_sample"] or temperature == 0:',
        'if not settings["do_sample"]:',
        ("tests/faults/harness_test.py",),
    ),
    "a text that does not end with its document": Fault(
        "heinsen_jax/interop/harness_options.py",
        "eos=end_of_text or None)",
        "eos=None)",
        ("tests/faults/harness_test.py",),
    ),
    "parameters that leave the memory of the host": Fault(
        "heinsen_jax/interop/transformers/pretrained.py",
        "np.asarray if on_host else jnp.asarray",
        "jnp.asarray",
        ("tests/interop/transformers_test.py",),
    ),
    "an export in another dtype than its original": Fault(
        "heinsen_jax/interop/transformers/pretrained.py",
        'dtype or others.get("dtype") or others.get("torch_dtype") or "float32"',
        'dtype or "float32"',
        ("tests/interop/transformers_test.py",),
    ),
    "an export that ignores its original": Fault(
        "heinsen_jax/interop/transformers/__main__.py",
        "tokenizer=tokenizer, like=options.like, dtype=options.dtype",
        "tokenizer=tokenizer, dtype=options.dtype",
        ("tests/interop/transformers_test.py",),
    ),
    "tensors of a file that the model lacks": Fault(
        "heinsen_jax/interop/transformers/checkpoint.py",
        "expected.keys() ^ tensors.keys()",
        "expected.keys() - tensors.keys()",
        ("tests/interop/transformers_test.py",),
    ),
    "copies of a tensor of which only shapes are compared": Fault(
        "heinsen_jax/interop/transformers/checkpoint.py",
        "if not np.array_equal(self._raw(first), self._raw(other), equal_nan=True):",
        "if self._raw(first).shape != self._raw(other).shape:",
        ("tests/faults/pretrained_test.py",),
    ),
}

STUDY_FAULTS = {
    "results with another text": Fault(
        "studies/runs.py",
        "if then[name] != now.get(name)",
        "if name not in now",
    ),
    "a p-value multiplied by all comparisons": Fault(
        "studies/differences.py",
        "(len(p_values) - index) * p_values[labels]",
        "len(p_values) * p_values[labels]",
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
    ),
    "a gradient of 0 at 0": Fault(
        "heinsen_jax/goom/numbers.py",
        "dx / jnp.where(x == 0, 1, x)\n",
        "jnp.where(x == 0, 0, dx / jnp.where(x == 0, 1, x))\n",
    ),
    "products that lose terms": Fault(
        "heinsen_jax/goom/wide.py",
        "first_safe(jnp.max(smallest_sum(x.dtype) - sums, initial=0)[None])",
        "jnp.int32(0)",
    ),
    "blocks of products that lose numbers": Fault(
        "heinsen_jax/goom/blocks.py",
        "return jnp.any((scaled == 0) & (numbers != 0))",
        "return jnp.any((scaled == 1) & (numbers == 0))",
        ("tests/goom/chains_test.py",),
    ),
    "chains without the products of earlier chunks": Fault(
        "heinsen_jax/goom/chains.py",
        "jnp.concatenate([x[None], y[:-1]]), start, at_ends)",
        "jnp.concatenate([x[None], 0 * y[:-1] + x[None]]), start, at_ends)",
    ),
    "exponents without the chunk before": Fault(
        "heinsen_jax/goom/lyapunov.py",
        "bases, _ = lax.scan(move, bases, before)",
        "bases, _ = lax.scan(move, bases, 0 * before + identity)",
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
    ),
    "stages with more updates than the budget": Fault(
        "studies/linearization.py",
        "steps=config.training.steps - first)",
        "steps=config.training.steps)",
    ),
    "a study with 0 concurrent runs": Fault(
        "studies/__main__.py",
        "if jobs < 1:",
        "if jobs < 0:",
        ("tests/studies/runner_test.py",),
    ),
    "names that overlap": Fault(
        "studies/labels.py",
        "gap = 1.3 * size * figure.dpi / 72 / axes.bbox.height",
        "gap = 1.3 * size / axes.bbox.height",
    ),
    "names in the order of the first points": Fault(
        "studies/labels.py",
        "key=lambda line: line.y[-1])",
        "key=lambda line: line.y[0])",
    ),
    "a ranking from the worst to the best": Fault(
        "studies/plots.py",
        "if not is_larger_better(self.metric):\n            ranked.reverse()",
        "if is_larger_better(self.metric):\n            ranked.reverse()",
    ),
    "highlighted lines below others": Fault(
        "studies/plots.py",
        "zorder=2 if is_gray else 3",
        "zorder=3 if is_gray else 2",
    ),
    "a best value at the last end of an axis": Fault(
        "studies/report.py",
        "elif best in (labels[0], labels[-1])",
        "elif best in labels[:1]",
        ("tests/studies/schedule_test.py",),
    ),
    "a kind of device in place of the model of a CPU": Fault(
        "studies/report.py",
        'x["cpu"] if x["backend"] == "cpu" else x["device"]',
        'x["device"]',
    ),
    "earlier results with other data": Fault(
        "studies/runner.py",
        "        if not report_only:\n            _check_content(study, recorded)\n",
        "",
    ),
    "two runs with the same settings": Fault(
        "studies/runner.py",
        "        runs_by_fingerprint[run.fingerprint] = run\n",
        "",
    ),
    "comparisons one after another": Fault(
        "studies/schedule.py",
        "return list(_alternating(first)), others",
        "return [run for runs in first for run in runs], others",
    ),
}

COMMANDS_FAULTS = {
    "a section that is changed alone": Fault(
        "heinsen_jax/config/override.py",
        "changed[section] = part",
        "changed = {section: part}",
        ("tests/config/load_test.py",),
    ),
    "a switch that cannot be negated": Fault(
        "heinsen_jax/runtime/arguments.py",
        "not is_negated if option.is_switch",
        "True if option.is_switch",
    ),
    "an option without a value that is required": Fault(
        "heinsen_jax/runtime/arguments.py",
        "option.default is dataclasses.MISSING:\n            name =",
        "option.default is None:\n            name =",
    ),
    "a second stage without the first": Fault(
        "heinsen_jax/linearize/plan.py",
        "replace(student, start=folder, initialization_tokens=0)",
        "replace(student, start=None, initialization_tokens=0)",
        ("tests/linearize_test.py",),
    ),
    "a recall of what cannot be known": Fault(
        "heinsen_jax/linearize/comparison.py",
        "features[:, 1 - length :], rows[:, 1 - length :]",
        "features[:, -length:], rows[:, -length:]",
        ("tests/linearize_test.py",),
    ),
    "layers that reduce the divergence least": Fault(
        "heinsen_jax/linearize/layers.py",
        "np.argsort(divergences",
        "np.argsort(-np.array(divergences)",
        ("tests/linearize_test.py",),
    ),
    "a fit that ignores the initial weights": Fault(
        "heinsen_jax/training/initialization.py",
        "return initial + change",
        "return change",
    ),
    "repeats of layers that are mixed up": Fault(
        "heinsen_jax/training/layerwise.py",
        "each[place::period]",
        "each[: len(each) // period]",
        ("tests/linearize_test.py",),
    ),
    "a norm whose scale is not shifted": Fault(
        "heinsen_jax/interop/transformers/rewriting.py",
        "value = value - 1",
        "value = value - 0",
        ("tests/interop/transformers_test.py",),
    ),
    "changed settings that are not noticed": Fault(
        "heinsen_jax/training/recorded.py",
        '("seed", "data", "optimizer", "distillation")',
        '("seed", "data", "distillation")',
        ("tests/config/load_test.py",),
    ),
    "an evaluation of training text": Fault(
        "heinsen_jax/evaluate.py",
        "return of_corpus(settings, own) if settings.mixtures else settings, False",
        "return of_corpus(settings, own) if settings.mixtures else settings, True",
    ),
    "an unread token that a saved chat lacks": Fault(
        "heinsen_jax/chat.py",
        "np.asarray(self.unread, np.int32)",
        "np.asarray([], np.int32)",
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
    ),
    "files that are not published after an error": Fault(
        "heinsen_jax/runs/folder.py",
        "            with contextlib.suppress(UserError):\n                self.publish()\n",
        "",
    ),
    "a locked folder without its owner": Fault(
        "heinsen_jax/storage/owners.py",
        "is in use by {describe_owner(content)};",
        "is in use;",
        ("tests/storage/locks_test.py",),
    ),
    "a lock that its process gets twice": Fault(
        "heinsen_jax/storage/locks.py",
        "fallback_to_soft=False)",
        "fallback_to_soft=False, is_singleton=True)",
    ),
    "a lock that is not released": Fault(
        "heinsen_jax/storage/buckets.py",
        "        thread.join()\n        lock.release()",
        "        thread.join()",
    ),
    "a batch that only one axis splits": Fault(
        "heinsen_jax/sharding.py",
        '"batch": ("data", "fsdp"),',
        '"batch": ("data",),',
    ),
    "a split that leaves a remainder": Fault(
        "heinsen_jax/sharding.py",
        "== 0 else None",
        ">= 0 else None",
    ),
    "a setting that another process lacks": Fault(
        "heinsen_jax/runtime/distributed.py",
        "sorted(ours.keys() | theirs.keys())",
        "sorted(ours.keys() & theirs.keys())",
    ),
    "a library without its extra": Fault(
        "heinsen_jax/errors.py",
        '"xxhash", "zstandard"),',
        '"xxhash"),',
        ("tests/slim_test.py",),
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
    ),
    "a user's allocator that is reconfigured": Fault(
        "heinsen_jax/runtime/allocator.py",
        'if chosen or sys.platform != "linux":',
        'if sys.platform != "linux":',
    ),
    "a run named after the file of its configuration": Fault(
        "heinsen_jax/train.py",
        "return config.absolute().parent.name if config.name == CONFIG_FILE else config.stem",
        "return config.stem",
    ),
    "changed settings that are always allowed": Fault(
        "heinsen_jax/training/prepare.py",
        "allowed=modes.allow_change)",
        "allowed=True)",
        ("tests/faults/lost_test.py",),
    ),
    "records that count as changes": Fault(
        "heinsen_jax/runtime/environment.py",
        ', "--", ":!benchmarks/results"',
        "",
    ),
    "descriptions of fields with the lines of the source": Fault(
        "heinsen_jax/runtime/arguments.py",
        'return " ".join(text.split())',
        "return text",
        ("tests/train_test.py",),
    ),
    "all sections in place of one": Fault(
        "heinsen_jax/config/help.py",
        'section in ("all", x.name.partition(".")[0])',
        "section",
        ("tests/train_test.py",),
    ),
    "calls that continue after an error": Fault(
        "heinsen_jax/runtime/on_ray.py",
        "        for left in waiting:\n            ray.cancel(left)",
        "        waiting.clear()",
    ),
    "an integer with commas that is not understood": Fault(
        "heinsen_jax/runtime/arguments.py",
        'float(given[0].replace(",", ""))',
        "float(given[0])",
        ("tests/faults/messages_test.py",),
    ),
    "a hint that depends on the section": Fault(
        "heinsen_jax/config/suggestions.py",
        '_HINTS.get(word.rpartition(".")[2])',
        "_HINTS.get(word)",
        ("tests/faults/messages_test.py",),
    ),
    "fields of a configuration that are ignored": Fault(
        "heinsen_jax/typing.py",
        'extra="forbid"',
        'extra="ignore"',
        ("tests/config/load_test.py",),
    ),
    "static fields that are leaves": Fault(
        "heinsen_jax/typing.py",
        'x.metadata.get("static", False)]',
        'x.metadata.get("is_static", False)]',
    ),
    "names of parameters with other separators": Fault(
        "heinsen_jax/pytrees.py",
        'separator="."',
        'separator="/"',
        ("tests/faults/parameters_test.py",),
    ),
    "a function that the package lacks": Fault(
        "heinsen_jax/__init__.py",
        '"heinsen_attention", "log_attention"',
        '"log_attention"',
        ("tests/package_test.py",),
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
