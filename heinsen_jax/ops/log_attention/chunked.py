"""Log-attention in blocks of tokens, each computed by the cheapest tier that is exact on it.

The tier of each block is chosen from a scalar that is measured first:

1. `fast`: masked matrix products over chunks. The exponent range must cover the *rise* of
keys inside a chunk above the keys visible to its first query, plus the *span* of log-values.
2. `exact`: everything else.

Nothing is clamped. The backward pass is written out, since differentiating `lax.scan` and
`lax.cond` would save copies of every block's inputs. Residuals are saved for a single
block, with zeros for the tier that is not chosen.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import is_symbolic, nearly_equal_blocks, unchunk, varying_like
from heinsen_jax.ops.log_attention import exact, fast
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs, Outputs, pad_tokens
from heinsen_jax.ops.log_attention.state import read_all
from heinsen_jax.ops.numerics import reciprocal, safe_log, share, where_empty
from heinsen_jax.typing import Array, DTypeLike, Float, Int

T = TypeVar("T")

MULTIPLE = 16  # chunk sizes are multiples of it
BLOCK_ON_CPU = 1024  # tokens that fit the cache
ELEMENTS_OF_BLOCK = 2**28  # on accelerators: 1 GiB of float32, in few large operations


@dataclass(frozen=True)
class Chunked:
    """Sizes of the chunked form; an instance can be given as `implementation`.

    Fields that are None are chosen by platform: for CPUs, small blocks that fit the cache; for
    accelerators, few large operations, and chunks whose states need about as much memory as their
    weights.

    Attributes:
      chunk_size: number of tokens C whose `[C, C]` weights are computed together; a multiple of 16.
      block_size: number of tokens that are processed in parallel, by one tier; a multiple of
        chunk_size.
      remat: whether the backward pass recomputes weights from the state before each block, in the
        memory of one block, for about 20% more time. False saves them as residuals. None recomputes
        them in calls of several blocks.
      exponent_budget: fraction of the exponent range, log(1 / smallest normal number), that a block
        may use. The rest is a margin for sums and gradients: without it, small terms are lost. With
        a negative one, every block is computed in log space.
      parallel_scan: whether the states of a block's chunks are computed by a parallel scan, not
        sequentially.
      matmul_dtype: dtype to which factors of matrix products are rounded, unlike sums and states.
        None: bfloat16 if all inputs are bfloat16, else float32.

    Examples:
      >>> key = jnp.zeros((40, 1, 2))
      >>> log_attention(key, key, key, implementation=Chunked(chunk_size=32)).shape
      (40, 1, 2)
    """

    chunk_size: int | None = None
    block_size: int | None = None
    remat: bool | None = None
    exponent_budget: float = 0.7
    parallel_scan: bool | None = None
    matmul_dtype: Literal["bfloat16", "float32"] | None = None

    def __post_init__(self) -> None:
        if self.matmul_dtype not in (None, "bfloat16", "float32"):
            raise ValueError(
                f'matmul_dtype must be "bfloat16", "float32" or None, got {self.matmul_dtype!r}'
            )
        size = self.chunk_size
        if size is not None and (size < 1 or size % MULTIPLE):
            raise ValueError(f"chunk_size must be a multiple of {MULTIPLE}, got {size}")
        if self.block_size is None:
            return
        least = MULTIPLE if size is None else size
        if self.block_size < 1 or self.block_size % least:
            raise ValueError(
                f"block_size must be a multiple of chunk_size={least}, got {self.block_size}"
            )

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Array, Array, Averages]:
        """Return output, log Z and the state after all tokens, in log space if values and state
        are."""
        plan, length = self.plan(inputs, is_log=is_log), inputs.length
        inputs, state = varying_like((inputs, state), (inputs, state))
        padded = pad_tokens(inputs, -(-length // plan.block_size) * plan.block_size)
        folded = Averages(*(x.reshape(-1, *x.shape[2:]) for x in state))
        result: tuple[Outputs, Averages] = _attend(plan, padded, folded)
        (y, log_z), after = result
        after = Averages(*(x.reshape(of.shape) for x, of in zip(after, state, strict=True)))
        return y[:, :length], log_z[:, :length], after

    def bidirectional(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Array, Averages]:
        """Return output and the state after all tokens; every query attends to all of them."""
        if not is_log:
            return read_all(inputs, state, is_log=False)
        span, scale = log_value_range(inputs.value, state.mean)

        def linear(inputs: Inputs, state: Averages) -> tuple[Array, Averages]:
            value = share(inputs.value, scale[:, None])
            state = state._replace(mean=share(state.mean, scale[:, :, None]))
            y, after = read_all(replace(inputs, value=value), state, is_log=False)
            mean = safe_log(after.mean) + scale[:, :, None]
            return safe_log(y) + scale[:, None, :, None], after._replace(mean=mean)

        tier = first_safe((span - self.budget(inputs.key.dtype))[None])
        in_logs = jax.checkpoint(partial(read_all, is_log=True))
        return lax.switch(tier, (linear, in_logs), inputs, state)

    def budget(self, dtype: DTypeLike) -> float:
        """Return the maximum difference of exponents in a block, in nats."""
        return -self.exponent_budget * math.log(jnp.finfo(dtype).smallest_normal)

    def plan(self, inputs: Inputs, *, is_log: bool) -> "Plan":
        """Resolve all sizes for these inputs on this platform."""
        on_cpu = jax.default_backend() == "cpu"
        chunk_size = self.chunk_size
        if chunk_size is None:
            depth = math.sqrt(inputs.key.shape[-1] * inputs.value.shape[-1])
            chunk_size = 64 if on_cpu or depth <= 64 else 128
            chunk_size = math.gcd(chunk_size, self.block_size or chunk_size)
        block_size = self.block_size
        if block_size is None:
            tokens = BLOCK_ON_CPU
            if not on_cpu and not is_symbolic(math.prod(inputs.query.shape)):
                batch, _, groups, heads, depth = inputs.query.shape
                per_token = batch * groups * heads * (chunk_size + depth + inputs.value.shape[-1])
                tokens = max(tokens, ELEMENTS_OF_BLOCK // max(per_token, 1))
            block_size = max(1, tokens // chunk_size) * chunk_size
        num_blocks, block_size = nearly_equal_blocks(inputs.length, block_size, chunk_size)
        return Plan(
            form=fast.Form(
                chunk_size,
                is_half=self.matmul_dtype == "bfloat16",
                parallel_scan=not on_cpu if self.parallel_scan is None else self.parallel_scan,
            ),
            block_size=block_size,
            remat=num_blocks != 1 if self.remat is None else self.remat,
            is_log=is_log,
            budget=self.budget(inputs.key.dtype),
        )


@dataclass(frozen=True)
class Plan:
    """Resolved `Chunked` of one call.

    Attributes:
      is_log: whether values and outputs are logarithms.
      budget: maximum difference of exponents in a block, in nats.
    """

    form: fast.Form
    block_size: int
    remat: bool
    is_log: bool
    budget: float

    @property
    def average(self) -> exact.Average:
        return exact.log_averages if self.is_log else exact.averages


class Measured(NamedTuple):
    """Measurements of a block, by which its tier is chosen; not differentiated.

    Attributes:
      tier: index of the first tier that is exact on the block.
      scale: divisor of values in linear space, or its logarithm.
      inverse: 1 / scale; None for log-values.
      scales: scales of exponents in the fast tier.
    """

    tier: Int[Array, ""]
    scale: Float[Array, "B G V"]
    inverse: Float[Array, "B G V"] | None
    scales: fast.MaxExponents


class Saved(NamedTuple):
    """Residuals of a block, besides the inputs and outputs of the call."""

    before: Averages
    measured: Measured
    residuals: tuple[fast.Residuals, Averages] | None  # per tier; zeros for one


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, inputs: Inputs, state: Averages) -> tuple[Outputs, Averages]:
    """Return ((output, log Z), state after all tokens); their number is a multiple of the block
    size."""
    return _forward(replace(plan, remat=True), inputs, state)[0]


def _forward(plan: Plan, inputs: Inputs, state: Averages):
    def step(carry: tuple[Averages, Outputs], index: Int[Array, ""]):
        before, outputs = carry
        (block_outputs, after), saved = _block(plan, _slice(inputs, index, plan.block_size), before)
        return (after, _write(outputs, block_outputs, index)), saved

    num_blocks = inputs.length // plan.block_size
    if num_blocks == 1:
        (outputs, after), saved = _block(plan, inputs, state)
    else:
        y = jnp.zeros((*inputs.query.shape[:-1], inputs.value.shape[-1]), inputs.value.dtype)
        outputs = varying_like((y, y[..., 0]), inputs)
        (after, outputs), saved = lax.scan(step, (state, outputs), jnp.arange(num_blocks))
    return (outputs, after), (inputs, saved)


def _backward(
    plan: Plan, residuals: tuple[Inputs, Saved], cotangents: tuple[Outputs, Averages]
) -> tuple[Inputs, Averages]:
    inputs, saved = residuals
    d_outputs, d_after = cotangents

    def step(carry: tuple[Averages, Inputs], xs: tuple[Int[Array, ""], Saved]):
        d_after, d_inputs = carry
        index, saved = xs
        block = _slice((inputs, d_outputs), index, plan.block_size)
        d_block, d_before = _block_backward(plan, *block, saved, d_after)
        return (d_before, _write(d_inputs, d_block, index)), None

    if inputs.length == plan.block_size:
        return _block_backward(plan, inputs, d_outputs, saved, d_after)
    d_inputs = jax.tree.map(jnp.zeros_like, replace(inputs, starts=None))
    indices = jnp.arange(inputs.length // plan.block_size)
    (d_state, d_inputs), _ = lax.scan(step, (d_after, d_inputs), (indices, saved), reverse=True)
    return d_inputs, d_state


_attend.defvjp(_forward, _backward)


def _block(plan: Plan, inputs: Inputs, state: Averages) -> tuple[tuple[Outputs, Averages], Saved]:
    """Return ((output, log Z), state after the block), and residuals."""
    measured = measure(plan, inputs, state)

    @partial(jax.jit, inline=True)  # traced once
    def fast_tier(inputs: Inputs, state: Averages):
        linear = _to_linear(inputs, state, measured)
        result, residuals = fast.forward(plan.form, *linear, measured.scales)
        before = varying_like(exact.no_states(inputs, state), inputs)
        return _from_linear(plan, result, measured.scale), None if plan.remat else (
            residuals,
            before,
        )

    def slow_tier(inputs: Inputs, state: Averages):
        result, before = exact.forward(plan.average, inputs, state)
        if plan.remat:
            return result, None
        nothing, _ = jax.eval_shape(fast_tier, inputs, state)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
        return result, (varying_like(nothing, inputs), before)

    result, residuals = lax.switch(measured.tier, (fast_tier, slow_tier), inputs, state)
    return result, Saved(state, measured, residuals)


def _block_backward(
    plan: Plan, inputs: Inputs, d_outputs: Outputs, saved: Saved, d_after: Averages
) -> tuple[Inputs, Averages]:
    """Return the cotangents of a block's inputs (None for `starts`) and of the state before it."""

    def fast_tier(d_outputs: Outputs, d_after: Averages) -> tuple[Inputs, Averages]:
        return _fast_backward(plan, inputs, saved, d_outputs, d_after)

    def slow_tier(d_outputs: Outputs, d_after: Averages) -> tuple[Inputs, Averages]:
        if saved.residuals is None:
            _, before = exact.forward(plan.average, inputs, saved.before)
        else:
            _, before = saved.residuals
        return exact.backward(plan.average, inputs, before, d_outputs, d_after)

    return lax.switch(saved.measured.tier, (fast_tier, slow_tier), d_outputs, d_after)


def measure(plan: Plan, inputs: Inputs, state: Averages) -> Measured:
    """Choose the tier. Costs memory-bound reductions, no matrix products."""
    inputs, state = lax.stop_gradient((inputs, state))
    scales, rise = fast.scales_and_rise(inputs, state.log_z, plan.form)
    batch, _, groups, _ = inputs.key.shape
    mean = state.mean.reshape(batch, groups, *state.mean.shape[1:])
    if plan.is_log:
        span, scale = log_value_range(inputs.value, mean)
        used = span + rise
    else:
        largest = jnp.maximum(
            jnp.max(jnp.abs(inputs.value), 1), jnp.max(jnp.abs(mean), -2, initial=0)
        )
        # The backward pass multiplies values by 1 / Z <= exp(rise): large ones use the range, too.
        used = rise + jnp.log(jnp.max(largest, initial=1))
        # Values above 1 are not scaled: dividing by them would lose smaller earlier ones.
        smallest = 4 * jnp.finfo(largest.dtype).smallest_normal  # with a finite inverse
        scale = jnp.where(largest == 0, 1, jnp.clip(largest, smallest, 1))
    inverse = None if plan.is_log else 1 / scale
    return Measured(first_safe((used - plan.budget)[None]), scale, inverse, scales)


def log_value_range(
    log_value: Float[Array, "B T G V"], log_mean: Float[Array, "B G K V"]
) -> tuple[Float[Array, ""], Float[Array, "B G V"]]:
    """Return the maximum span of log-values of one feature, in nats, including the state and
    excluding log 0 = -inf; and the largest of each feature, 0 if all are -inf."""
    log_value, log_mean = lax.stop_gradient((log_value, log_mean))

    def smallest(x: Array, axis: int) -> Array:
        return jnp.min(jnp.where(x == -jnp.inf, jnp.inf, x), axis, initial=jnp.inf)

    low = jnp.minimum(smallest(log_value, 1), smallest(log_mean, -2))
    high = jnp.maximum(
        jnp.max(log_value, 1, initial=-jnp.inf), jnp.max(log_mean, -2, initial=-jnp.inf)
    )
    span = jnp.max(high - low, initial=0.0)  # -inf where all are log 0
    return span, where_empty(high, 0.0)


def _fast_backward(
    plan: Plan, inputs: Inputs, saved: Saved, d_outputs: Outputs, d_after: Averages
) -> tuple[Inputs, Averages]:
    scale = saved.measured.scale
    if saved.residuals is not None:
        residuals, _ = saved.residuals
    else:
        linear = _to_linear(inputs, saved.before, saved.measured)
        _, residuals = fast.forward(plan.form, *linear, saved.measured.scales)
    _, _, groups, heads, _ = inputs.query.shape
    y, value = unchunk(residuals.y, groups, heads), unchunk(residuals.value, groups, 1)[:, :, :, 0]
    d_result = _d_from_linear(plan, (d_outputs, d_after), scale, y, residuals.mean_end)
    d_linear = fast.backward(plan.form, inputs, residuals, *d_result)
    return _d_to_linear(*d_linear, saved.measured, value, residuals.mean)


def _to_linear(inputs: Inputs, state: Averages, measured: Measured) -> tuple[Inputs, Averages]:
    if measured.inverse is None:
        value = share(inputs.value, measured.scale[:, None])
        mean = share(state.mean, _for_state(measured.scale))
    else:
        value = inputs.value * measured.inverse[:, None]
        mean = state.mean * _for_state(measured.inverse)
    return replace(inputs, value=value), state._replace(mean=mean)


def _d_to_linear(
    d_inputs: Inputs, d_state: Averages, measured: Measured, value: Array, mean: Array
) -> tuple[Inputs, Averages]:
    """Return the cotangents of the arguments of `_to_linear`, given its results `value` and `mean`
    and the cotangents of all its results."""
    if measured.inverse is not None:
        value, mean = measured.inverse[:, None], _for_state(measured.inverse)
    d_inputs = replace(d_inputs, value=d_inputs.value * value)
    return d_inputs, d_state._replace(mean=d_state.mean * mean)


def _from_linear(
    plan: Plan, result: tuple[Outputs, Averages], scale: Array
) -> tuple[Outputs, Averages]:
    (y, log_z), after = result

    def leave(x: Array, scale: Array) -> Array:
        return safe_log(x) + scale if plan.is_log else x * scale

    y, mean = leave(y, scale[:, None, :, None]), leave(after.mean, _for_state(scale))
    return (y, log_z), after._replace(mean=mean)


def _d_from_linear(
    plan: Plan, d_result: tuple[Outputs, Averages], scale: Array, y: Array, mean: Array
) -> tuple[Outputs, Averages]:
    """Return the cotangents of the arguments of `_from_linear`."""
    (d_y, d_log_z), d_after = d_result
    y_factor = reciprocal(y) if plan.is_log else scale[:, None, :, None]
    mean_factor = reciprocal(mean) if plan.is_log else _for_state(scale)
    return (d_y * y_factor, d_log_z), d_after._replace(mean=d_after.mean * mean_factor)


def _for_state(scale: Array) -> Float[Array, "X 1 V"]:
    return scale.reshape(-1, 1, scale.shape[-1])


def _slice(tree: T, index: Int[Array, ""], size: int) -> T:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size, 1), tree)


def _write(whole: T, block: T, index: Int[Array, ""]) -> T:
    def put(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, index * part.shape[1], 1)

    return jax.tree.map(put, whole, block)
