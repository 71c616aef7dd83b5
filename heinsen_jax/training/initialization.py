"""Initial weights of new attention layers, fitted to a teacher's layers before the first update.

No gradients are computed: each layer, in their order, is fitted in closed form on a few thousand
tokens, given the inputs that it has behind the fitted layers before it.
"""

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from heinsen_jax.attention.log_window import LogWindowAttention
from heinsen_jax.attention.parameters import in_float32
from heinsen_jax.data import Batch
from heinsen_jax.models import LanguageModel
from heinsen_jax.models.blocks import Block
from heinsen_jax.training.layerwise import through_layers
from heinsen_jax.typing import Array, Bool, Features, Float, Integer

RIDGE = 0.1
"""Weight of the distance from the initial weights, relative to the mean square of the features."""
CANDIDATES = {
    "query_features": (operator.mul, (1.0, 2.0, 4.0)),
    "key_features": (operator.mul, (1.0, 2.0, 4.0)),
    "log_weight_bias": (operator.add, (0.0, -2.0, -4.0, -6.0, 2.0)),
}
"""Changes of other parameters of `log_window` that are tried, by name; the first is none."""


def fit_to_teacher(model: LanguageModel, teacher: LanguageModel, batch: Batch) -> nnx.State:
    """The parameters of a model whose replaced attention layers are fitted to the teacher's.

    For each such layer, given its inputs X in the model and the outputs Y of the teacher's layer:

        W = argmin_W |H W - Y|^2 + r |W - W_0|^2

    for the matrix W of its output projection, initially W_0, and the outputs H of its heads, with
    r = 0.1 times the mean square of a feature of H, summed over tokens. In `log_window`, factors of
    the two matrices of Hedgehog's features and a shift of the log weight of earlier tokens are
    chosen before, one after the other, among `CANDIDATES`, to minimize |H W - Y|^2.

    Args:
      model: the model.
      teacher: the teacher.
      batch: sequences of tokens.

    References:
      Zhou et al., 2026, Taylor-Calibrate, arXiv:2606.16429, who fit values, decays and gates, and
      align layers by gradient descent.
    """
    segment_ids = jax.tree.map(jnp.asarray, batch.input_segments)
    tokens = jnp.asarray(batch.tokens)[:, :-1]
    mask = jnp.asarray(batch.loss_mask)

    def visit(
        ours: Block,
        theirs: Block,
        is_replaced: bool,
        carry: tuple[Features, Features],
        element: None,
    ) -> tuple[tuple[Features, Features], nnx.State]:
        del element
        x, wanted_x = carry
        normed, inputs, _ = theirs.attention_input(wanted_x, segment_ids=segment_ids)
        wanted = theirs.attention(inputs, segment_ids=segment_ids)
        wanted_x, _ = theirs.after_attention(wanted_x, normed, wanted, segment_ids=segment_ids)
        normed, inputs, _ = ours.attention_input(x, segment_ids=segment_ids)
        if is_replaced:
            nnx.update(ours.attention, _fitted(ours.attention, inputs, wanted, mask, segment_ids))
        attended = ours.attention(inputs, segment_ids=segment_ids)
        x, _ = ours.after_attention(x, normed, attended, segment_ids=segment_ids)
        return (x, wanted_x), nnx.state(ours.attention, nnx.Param)

    start = model.embedded(tokens, segment_ids)[0], teacher.embedded(tokens, segment_ids)[0]
    _, by_place = through_layers(model, teacher, visit, start)
    pattern = len(model.blocks)
    for place, block in enumerate(model.blocks):
        parts = by_place[place::pattern]
        layers = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *parts)
        nnx.update(block.attention, layers)
    return nnx.state(model, nnx.Param)


def _fitted(
    attention: Any,
    inputs: Features,
    wanted: Features,
    mask: Bool[Array, "B T"],
    segment_ids: Integer[Array, "B T"] | None,
) -> nnx.State:
    """The parameters of a layer, fitted, if it has an output projection."""
    output = getattr(attention, "output", None)
    if not isinstance(output, nnx.Linear):
        return nnx.state(attention, nnx.Param)
    kernel = in_float32(output.kernel[...])
    wanted = in_float32(wanted)
    if output.bias is not None:
        factor = getattr(attention.config, "output_multiplier", 1.0)
        wanted = wanted - factor * in_float32(output.bias[...])
    wanted = (wanted * mask[..., None]).reshape(-1, wanted.shape[-1])
    graph, parameters = nnx.split(attention)

    def solved(parameters: nnx.State) -> tuple[Float[Array, "H D"], Float[Array, ""]]:
        """The matrix of the output projection, and its error."""
        layer = nnx.merge(graph, parameters)
        layer.output = lambda heads: heads
        heads = in_float32(layer(inputs, segment_ids=segment_ids)) * mask[..., None]
        heads = heads.reshape(-1, heads.shape[-1])
        matrix = _ridge(heads, wanted, kernel)
        with jax.default_matmul_precision("highest"):
            return matrix, jnp.sum((heads @ matrix - wanted) ** 2)

    def changed(parameters: nnx.State, name: str, value: Array) -> nnx.State:
        layer, (change, _) = nnx.merge(graph, parameters, copy=True), CANDIDATES[name]
        parameter = getattr(layer, name)
        parameter[...] = change(parameter[...], value.astype(parameter.dtype))
        return nnx.state(layer, nnx.Param)

    def error(parameters: nnx.State, name: str, value: Array) -> Array:
        return solved(changed(parameters, name, value))[1]

    is_merged = isinstance(attention, LogWindowAttention)
    for name, (_, values) in (CANDIDATES if is_merged else {}).items():
        if hasattr(attention, name):
            candidates = jnp.asarray(values)
            errors = lax.map(partial(error, parameters, name), candidates)
            best = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf))
            parameters = changed(parameters, name, candidates[best])
    matrix, _ = solved(parameters)
    layer = nnx.merge(graph, parameters, copy=True)
    layer.output.kernel[...] = matrix.astype(output.kernel.dtype)
    return nnx.state(layer, nnx.Param)


def _ridge(
    features: Float[Array, "N H"], wanted: Float[Array, "N D"], initial: Float[Array, "H D"]
) -> Float[Array, "H D"]:
    """argmin_W |features W - wanted|^2 + r |W - initial|^2"""
    with jax.default_matmul_precision("highest"):
        gram = features.T @ features
        weight = RIDGE * jnp.trace(gram) / len(gram) + jnp.finfo(gram.dtype).tiny
        residual = features.T @ (wanted - features @ initial)
        change = jax.scipy.linalg.solve(
            gram + weight * jnp.eye(len(gram), dtype=gram.dtype), residual, assume_a="pos"
        )
    return initial + change
