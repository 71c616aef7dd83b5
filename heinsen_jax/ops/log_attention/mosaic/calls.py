"""Calls of the GPU kernels: inputs as they want them, tests of their sums, and gradients.

Where there are fewer heads than a GPU can compute at a time, texts are cut into spans, and each
span is a program of its own, as if it were a text: first the states of all spans by themselves,
from these the states before each, and then everything else for all spans at once.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention import gpu_kernels as kernels
from heinsen_jax.ops.log_attention import gpu_step
from heinsen_jax.ops.log_attention.chunked import padded
from heinsen_jax.ops.log_attention.gpu import DEPTHS, Fused
from heinsen_jax.ops.log_attention.gpu_matrices import ROWS
from heinsen_jax.ops.log_attention.gpu_streams import CHUNK, Operands
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import einsum, log_sum_exp, reciprocal, safe_log, share
from heinsen_jax.typing import Array

ENOUGH_PROGRAMS = 512  # two or more for each multiprocessor of the largest GPUs
SHORTEST_SPAN = 512  # tokens, below which states cost as much as what they save


def causal(fused: Fused, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
    """`Fused.causal`."""
    length = tokens.length
    if length == 1:
        return gpu_step.attend(tokens, state)
    batch, _, groups, heads, _ = tokens.query.shape
    spans = fused.spans or _spans(batch * groups * heads, length)
    multiple = spans * CHUNK
    tokens = padded(tokens, -(-length // multiple) * multiple)
    inputs = tokens.query, tokens.key, tokens.value, tokens.log_decay
    result: Any = _attend(fused, spans, inputs, tokens.starts, state)
    (y, log_z), after = result
    return y[:, :length], log_z[:, :length], after


def _spans(programs: int, length: int) -> int:
    most = min(ENOUGH_PROGRAMS // max(1, programs), length // SHORTEST_SPAN)
    return 1 << max(0, most.bit_length() - 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(fused: Fused, spans: int, inputs: Any, starts: Array | None, state: Any) -> Any:
    return _attend_forward(fused, spans, inputs, starts, state)[0]


def _attend_forward(fused: Fused, spans: int, inputs: Any, starts: Array | None, state: Any):
    is_log = isinstance(state, LogAttentionState)
    cut, initial = _Cut.of(spans, inputs, starts), _means(state)
    own = cut.own_states(is_log) if cut.spans > 1 else None
    found = kernels.forward(cut.operands(cut.states_before(own, initial)), is_log)
    margins = [found.margin]
    if own is not None:  # gradients of own states are divided by their part of the sums
        part = jnp.exp(own.log_z - cut.of_groups(found.end))
        margins.append(jnp.where(own.log_z == -jnp.inf, 1.0, part))
    is_safe = fused.is_safe(margins, found.largest)
    outputs = lax.cond(
        is_safe,
        lambda: _outputs(cut, found, is_log),
        lambda: _exactly(fused, inputs, starts, state),
    )
    return outputs, (inputs, starts, state, own, found, is_safe)


def _attend_backward(fused: Fused, spans: int, saved: Any, cotangents: Any):
    inputs, starts, state, own, found, is_safe = saved

    def by_kernels():
        cut = _Cut.of(spans, inputs, starts)
        initial, pull = jax.vjp(_means, state)
        d_inputs, d_initial = _gradients(cut, own, initial, found, cotangents)
        whole = jax.tree.map(lambda d, x: d.reshape(x.shape), d_inputs, inputs)
        return whole, pull(d_initial)[0]

    def exactly():
        def attend(inputs, state):
            return _exactly(fused, inputs, starts, state)

        return jax.vjp(attend, inputs, state)[1](cotangents)

    d_inputs, d_state = lax.cond(is_safe, by_kernels, exactly)
    return d_inputs, None, d_state


_attend.defvjp(_attend_forward, _attend_backward)


def _exactly(fused: Fused, inputs: Any, starts: Array | None, state: Any) -> Any:
    """((output, log Z), state after all tokens) by what computes unsafe calls."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    y, log_z, after = fused.otherwise.causal(Tokens(*exact, starts=starts), state)
    return (y.astype(inputs[0].dtype), log_z), after


def _means(state: Any) -> MeanState:
    return state if isinstance(state, MeanState) else state.to_means()


@dataclass(frozen=True)
class _Cut:
    """Texts cut into spans: arrays of `Tokens` as `[B P, T / P, ...]`."""

    spans: int
    query: Array
    key: Array
    value: Array
    log_decay: Array | None
    starts: Array | None

    @classmethod
    def of(cls, spans: int, inputs: Any, starts: Array | None) -> "_Cut":
        def cut(x: Array) -> Array:
            return x.reshape(x.shape[0] * spans, x.shape[1] // spans, *x.shape[2:])

        arrays: list[Any] = [None if x is None else cut(x) for x in (*inputs, starts)]
        return cls(spans, *arrays)

    def by_text(self, x: Array) -> Array:
        """`[B P, ...]` -> `[B, P, ...]`"""
        return x.reshape(-1, self.spans, *x.shape[1:])

    def of_groups(self, x: Array) -> Array:
        """`[B P, H, K']` of heads -> `[B P, G, K]`, as each group's first head has it."""
        return x[:, :: self.query.shape[3], : self.key.shape[-1]]

    def means_of(self, end: Array, z: Array, total: Array) -> MeanState:
        """The state of sums `[B P, G, V', K']` in the scale `end`."""
        key_depth, value_depth = self.key.shape[-1], self.value.shape[-1]
        mean = jnp.swapaxes(total[..., :value_depth, :key_depth], -1, -2)
        z = z[..., :key_depth]
        mean = mean * reciprocal(z)[..., None]
        return MeanState(safe_log(z) + end[..., :key_depth], mean)

    def own_states(self, is_log: bool) -> MeanState:
        """Of each span's tokens alone."""
        batch, groups, key_depth = len(self.key), self.key.shape[2], self.key.shape[-1]
        nothing = MeanState(
            jnp.full((batch, groups, key_depth), -jnp.inf),
            jnp.zeros((batch, groups, key_depth, self.value.shape[-1])),
        )
        return self.means_of(**kernels.absorb(self.operands(nothing), is_log))

    def states_before(self, own: MeanState | None, initial: MeanState) -> MeanState:
        """The state before each span, of the one before all and those of earlier spans."""
        if own is None:
            return initial
        own = jax.tree.map(self.by_text, own)
        earlier = jax.tree.map(
            lambda first, own: jnp.concatenate([first[:, None], own[:, :-1]], 1), initial, own
        )
        span = jnp.arange(self.spans)
        batch, *sizes = earlier.log_z.shape
        log_z = jnp.broadcast_to(earlier.log_z[:, None], (batch, self.spans, *sizes))
        if (lost := self._lost()) is not None:
            # Of what was added before span i, span j finds what spans i to j - 1 have left.
            j, i, of = (jnp.expand_dims(span, axes) for axes in ((1, 2), (0, 2), (0, 1)))
            since = (i <= of) & (of < j)
            lost = jnp.where(since[None, ..., None, None], lost[:, None, None], 0.0)
            log_z = log_z + jnp.sum(lost, 3)
        is_earlier = span[None] <= span[:, None]
        log_z = jnp.where(is_earlier[None, ..., None, None], log_z, -jnp.inf)
        total = log_sum_exp(log_z, 2)
        shares = share(log_z, total[:, :, None])
        mean = einsum("bjigk,bigkv->bjgkv", shares, earlier.mean)
        before = MeanState(total, mean)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), before)

    def _lost(self) -> Array | None:
        """Decay of each span `[B, P, G, K or 1]`, all where a document begins; None if none."""
        lost = None
        if self.log_decay is not None:
            lost = self.by_text(jnp.sum(self.log_decay, 1))
        if self.starts is not None:
            lost = jnp.zeros((1, 1, 1, 1)) if lost is None else lost
            has_start = self.by_text(jnp.any(self.starts, 1))
            lost = jnp.where(has_start[..., None, None], -jnp.inf, lost)
        return lost

    def operands(self, before: MeanState) -> Operands:
        batch, length, groups, heads, _ = self.query.shape
        key_depth, value_depth = _served(self.key), _served(self.value)
        # Features past the last are log 1 where values are logarithms, and averages of that.
        mean = _widened(before.mean, value_depth, 1)
        mean = _widened(jnp.swapaxes(mean, -1, -2), key_depth, 0)
        missing = max(value_depth, ROWS) - value_depth
        query = _widened(self.query, key_depth, -jnp.inf)  # features that are no part of any sum
        operands = Operands(
            query.reshape(batch, length, groups * heads, key_depth),
            _widened(self.key, key_depth, -jnp.inf),
            _widened(self.value, value_depth, 0),
            _widened(before.log_z, key_depth, -jnp.inf),
            jnp.pad(mean, ((0, 0), (0, 0), (0, missing), (0, 0))),
        )
        if self.log_decay is not None:
            so_far = jnp.cumsum(_in_chunks(self.log_decay), 2)
            at_end = jnp.swapaxes(so_far[:, :, -1], 1, 2)
            so_far = so_far.reshape(self.log_decay.shape)
            if so_far.shape[-1] == 1:
                so_far = jnp.swapaxes(so_far[..., 0], 1, 2)
                at_end = jnp.broadcast_to(at_end, (*at_end.shape[:3], key_depth))
            else:
                so_far, at_end = _widened(so_far, key_depth, 0), _widened(at_end, key_depth, 0)
            operands = replace(operands, so_far=so_far, at_end=at_end)
        if self.starts is not None:
            documents = jnp.cumsum(_in_chunks(self.starts.astype(jnp.int32)), 2)
            last = documents[:, :, -1:]
            carried = jnp.where(last == 0, 0.0, -jnp.inf)
            operands = replace(
                operands,
                documents=documents.reshape(batch, length),
                is_last=(documents == last).astype(jnp.int32).reshape(batch, length),
                carried=jnp.broadcast_to(carried, (*carried.shape[:2], key_depth)),
            )
        return operands


def _served(x: Array) -> int:
    """The depth for which there are kernels."""
    return next(depth for depth in DEPTHS if depth >= x.shape[-1])


def _widened(x: Array, depth: int, fill: float) -> Array:
    missing = depth - x.shape[-1]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)], constant_values=fill)


def _in_chunks(x: Array) -> Array:
    """`[B, T, ...]` -> `[B, J, 64, ...]`"""
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


def _outputs(cut: _Cut, found: kernels.Forward, is_log: bool) -> Any:
    """((output, log Z), state after all tokens), as `Chunked` has them."""
    *sizes, _ = cut.query.shape
    sizes = -1, sizes[1] * cut.spans, *sizes[2:]
    value_depth = cut.value.shape[-1]
    y = found.y[..., :value_depth].reshape(*sizes, value_depth)
    log_z = jnp.moveaxis(found.log_z, 1, 2).reshape(sizes)
    after = _after(cut, found)
    return (y, log_z), after.to_logs(jnp.zeros(())) if is_log else after


def _after(cut: _Cut, found: kernels.Forward) -> MeanState:
    """The state after all tokens."""
    heads = cut.query.shape[3]
    ends = (cut.by_text(x)[:, -1, ::heads] for x in (found.end, found.z_after, found.sum_after))
    return cut.means_of(*ends)


def _gradients(
    cut: _Cut, own: MeanState | None, initial: MeanState, found: kernels.Forward, cotangents: Any
) -> tuple[Any, MeanState]:
    """Of query, key, value and log_decay, cut as they are, and of the state before all tokens."""
    (d_y, d_log_z), d_after = cotangents
    is_log = isinstance(d_after, LogAttentionState)
    after = _after(cut, found)
    if is_log:
        d_after = jax.vjp(lambda means: means.to_logs(jnp.zeros(())), after)[1](d_after)[0]
    sizes = found.y.shape[:3]
    results = kernels.Results(
        y=found.y,
        log_z=found.log_z,
        scales=found.scales,
        d_y=_widened(d_y.reshape(*sizes, -1), found.y.shape[-1], 0),
        d_log_z=jnp.moveaxis(d_log_z.reshape(sizes), 1, 2),
    )
    before, pull = jax.vjp(cut.states_before, own, initial)
    operands = cut.operands(before)
    of_query = kernels.query_gradient(operands, results, is_log)
    if is_log:
        results = replace(results, d_y=of_query["d_average"])
    d_total = of_query["d_total"]
    in_last, d_after_last = (jax.tree.map(partial(_in_last_span, cut), x) for x in (after, d_after))
    d_sums = _gradient_of_sums(cut, found, in_last, d_after_last)
    if own is None:
        of_others = kernels.key_value_gradient(operands, results, d_total, d_sums, is_log)
        d_initial = _gradient_before(cut, before, of_others)
    else:
        of_state = kernels.state_gradient(operands, results, d_total, d_sums)
        d_own, d_initial = pull(_gradient_before(cut, before, of_state))
        d_sums = jax.tree.map(jnp.add, d_sums, _gradient_of_sums(cut, found, own, d_own))
        of_others = kernels.key_value_gradient(operands, results, d_total, d_sums, is_log)

    key_depth, value_depth = cut.key.shape[-1], cut.value.shape[-1]
    d_query = of_query["d_query"][..., :key_depth].reshape(cut.query.shape)
    d_key = _over_groups(cut, of_others["d_key"], 2)[..., :key_depth]
    d_value = _over_groups(cut, of_others["d_value"], 2)[..., :value_depth]
    d_decay = None
    if cut.log_decay is not None:
        # Decays summed from the start, b: queries are Q + b, keys K - b, and log Z at the end + b.
        d_so_far = jnp.sum(d_query, 3) - d_key
        d_so_far = d_so_far.reshape(-1, d_so_far.shape[1] * cut.spans, *d_so_far.shape[2:])
        d_so_far = d_so_far.at[:, -1].add(d_after.log_z)
        if cut.log_decay.shape[-1] == 1:
            d_so_far = jnp.sum(d_so_far, -1, keepdims=True)
        d_decay = lax.cumsum(d_so_far, 1, reverse=True)
    dtype = cut.query.dtype
    return (*(x.astype(dtype) for x in (d_query, d_key, d_value)), d_decay), d_initial


def _in_last_span(cut: _Cut, x: Array) -> Array:
    """`[B, ...]` -> `[B P, ...]`, 0 in all other spans."""
    x = jnp.pad(x[:, None], [(0, 0), (cut.spans - 1, 0)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, *x.shape[2:])


def _gradient_of_sums(
    cut: _Cut, found: kernels.Forward, state: MeanState, d_state: MeanState
) -> tuple[Array, Array]:
    """From that of states `[B P, G, ...]`, that of their z and S in the scale in which `found` has
    the states after spans: for the first head of each group, 0 for the others."""
    inverse = share(cut.of_groups(found.end), state.log_z)
    d_z = inverse * (d_state.log_z - jnp.sum(d_state.mean * state.mean, -1))
    d_sum = jnp.swapaxes(d_state.mean * inverse[..., None], -1, -2)
    rows, columns = found.sum_after.shape[2:]
    d_sum = jnp.pad(d_sum, [(0, 0)] * 2 + [(0, rows - d_sum.shape[2]), (0, 0)])
    heads = cut.query.shape[3]

    def of_first_head(x: Array) -> Array:
        x = jnp.pad(x[:, :, None], [(0, 0)] * 2 + [(0, heads - 1)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return of_first_head(_widened(d_z, columns, 0)), of_first_head(_widened(d_sum, columns, 0))


def _gradient_before(cut: _Cut, before: MeanState, found: dict[str, Array]) -> MeanState:
    """From that of z = 1 and S = mean, that of the state before."""
    key_depth, value_depth = cut.key.shape[-1], cut.value.shape[-1]
    d_z, d_sum = (_over_groups(cut, found[name], 1) for name in ("d_z", "d_sum"))
    d_mean = jnp.swapaxes(d_sum[..., :value_depth, :key_depth], -1, -2)
    return MeanState(d_z[..., :key_depth] + jnp.sum(d_mean * before.mean, -1), d_mean)


def _over_groups(cut: _Cut, x: Array, axis: int) -> Array:
    """Sums over the heads of each group, of H on an axis."""
    groups, heads = cut.query.shape[2:4]
    return jnp.sum(x.reshape(*x.shape[:axis], groups, heads, *x.shape[axis + 1 :]), axis + 1)
