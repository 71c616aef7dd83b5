"""The gated delta rule against its recurrence, token by token."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from heinsen_jax.ops import (
    MatrixState,
    dot_product_attention,
    gated_delta_rule,
    linear_attention,
    log_attention,
    matrix_state,
    mlstm_attention,
)
from heinsen_jax.ops.gated_delta_rule import matrix_summary

BATCH, HEADS, KEY_DEPTH, VALUE_DEPTH = 2, 2, 5, 3


def recurrence(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any = 0.0,
    erase: Any = 0.0,
    write: Any = 1.0,
    initial_state: Any = 0.0,
    starts: Any = False,
    erase_key: Any = None,
    num_steps: int = 1,
) -> tuple[Any, Any]:
    """S_t = (I - k_t (b_t * k_t)^T) Diag(exp g_t) S_(t-1) + k_t (w_t * v_t)^T, o_t = S_t^T q_t /
    sqrt(K), with S = 0 before tokens that start a segment; or (I - (b_t * e_t) e_t^T) with
    `erase_key`. In several steps a token, o_t follows the last one, and others have g = 0."""
    length, depth = query.shape[1], key.shape[-1]
    gates = {"erase": expand(erase, key), "write": expand(write, value)}
    gates |= {"key": key, "value": value, "other": key if erase_key is None else erase_key}
    steps = {name: x.reshape(-1, length, num_steps, *x.shape[2:]) for name, x in gates.items()}
    keep = jnp.broadcast_to(~jnp.asarray(starts)[..., None, None], (*query.shape[:-1], 1))
    steps |= {"query": query, "decay": keep * jnp.exp(expand(log_decay, query))}
    state = jnp.broadcast_to(initial_state, (*key.shape[:1], *key.shape[2:], value.shape[-1]))

    def step(state: Any, token: Any) -> tuple[Any, Any]:
        state = token["decay"][..., None] * state
        for i in range(num_steps):
            k, v, e, b, w = (token[x][:, i] for x in ("key", "value", "other", "erase", "write"))
            first, second = (k, b * k) if erase_key is None else (b * e, e)
            read = jnp.einsum("bnk,bnkv->bnv", second, state)
            state = state - jnp.einsum("bnk,bnv->bnkv", first, read)
            state = state + jnp.einsum("bnk,bnv->bnkv", k, w * v)
        return state, jnp.einsum("bnk,bnkv->bnv", token["query"], state)

    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in steps.items()}
    state, y = lax.scan(step, state, tokens)
    return jnp.moveaxis(y, 0, 1) / np.sqrt(depth), state


def expand(x: Any, like: Any) -> Any:
    """A gate of heads, or a number, as one of features."""
    x = jnp.asarray(x, like.dtype)
    x = x[..., None] if 0 < x.ndim < like.ndim else x
    return jnp.broadcast_to(x, like.shape)


class Case(NamedTuple):
    length: int
    decay: str | None = None
    erase: str | None = None
    write: str | None = None
    strength: float = 0.1
    segments: bool = False
    num_steps: int = 1
    is_apart: bool = False

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        tokens = BATCH, self.length, HEADS
        steps = BATCH, self.length * self.num_steps, HEADS
        query = rng.standard_normal((*tokens, KEY_DEPTH))
        key, other = (unit(rng.standard_normal((*steps, KEY_DEPTH))) for _ in range(2))
        arrays = {"query": query, "key": key}
        arrays["value"] = rng.standard_normal((*steps, VALUE_DEPTH))
        if self.is_apart:
            arrays["erase_key"] = other
        if self.decay is not None:
            decay = -self.strength * rng.exponential(size=shape(tokens, self.decay, KEY_DEPTH))
            if self.strength > 1:
                special = rng.choice([0, -1e6, -np.inf], decay.shape)
                decay = np.where(rng.uniform(size=decay.shape) < 0.1, special, decay)
            arrays["log_decay"] = decay
        if self.erase is not None:
            arrays["erase"] = rng.uniform(0, 2, shape(steps, self.erase, KEY_DEPTH))
        if self.write is not None:
            arrays["write"] = rng.standard_normal(shape(steps, self.write, VALUE_DEPTH))
        arrays["initial_state"] = rng.standard_normal((BATCH, HEADS, KEY_DEPTH, VALUE_DEPTH))
        return arrays

    def segment_ids(self) -> np.ndarray | None:
        if not self.segments:
            return None
        rng = np.random.default_rng(1)
        return np.cumsum(rng.uniform(size=(BATCH, self.length)) < 0.05, 1).astype(np.int32)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def shape(tokens: tuple[int, ...], kind: str, depth: int) -> tuple[int, ...]:
    return tokens if kind == "head" else (*tokens, depth)


CASES = [
    Case(1, "feature", "head", "head"),
    Case(33, None, None, None),
    Case(100, "head", None, "head"),
    Case(67, "feature", None, "feature", segments=True),
    Case(150, None, "head", "head"),
    Case(63, "head", "feature", None, segments=True),
    Case(150, "feature", "head", "head"),
    Case(70, "head", None, None, strength=20, segments=True),
    Case(70, "feature", None, None, strength=20),
    Case(150, "feature", "feature", "feature", strength=5, segments=True),
    Case(1, "feature", "feature", is_apart=True),
    Case(70, "feature", "head", "feature", strength=5, segments=True, is_apart=True),
    Case(40, None, "feature", is_apart=True),
    Case(1, "head", "head", "head", num_steps=3),
    Case(45, "head", "head", "head", num_steps=3, segments=True),
    Case(30, "feature", "head", num_steps=2, is_apart=True, segments=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("x64")
def test_values_and_gradients_equal_the_recurrence(case):
    arrays, ids = case.arrays(), case.segment_ids()
    starts = np.zeros((BATCH, case.length), bool)
    if ids is not None:
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    rng = np.random.default_rng(2)
    y, state = recurrence(**arrays, starts=starts, num_steps=case.num_steps)
    cotangents = rng.standard_normal(y.shape), rng.standard_normal(state.shape)

    def differentiate(function: Any) -> Any:
        @jax.jit
        def run(arrays: Any) -> Any:
            result, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
            return result, pullback(cotangents)[0]

        return run(arrays)

    steps = {"num_steps": case.num_steps}
    have = differentiate(partial(gated_delta_rule, segment_ids=ids, return_state=True, **steps))
    want = differentiate(partial(recurrence, starts=starts, **steps))
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "decay",
    [1e-3, 30.0, *(pytest.param(x, marks=pytest.mark.nightly) for x in (0.5, 1.9, 12.0))],
)
@pytest.mark.parametrize("kind", ["head", "feature"])
@pytest.mark.usefixtures("as_users_compile")
def test_float32_is_accurate_for_any_decay(kind, decay):
    """Values, and gradients relative to their own size, with decays of similar sizes."""
    arrays = {k: np.float32(x) for k, x in Case(100, kind).arrays().items()}
    noise = np.random.default_rng(3).uniform(0.9, 1.1, arrays["log_decay"].shape)
    arrays["log_decay"] = np.float32(-decay * noise)
    del arrays["initial_state"]
    cotangent = np.random.default_rng(4).standard_normal(arrays["value"].shape).astype(np.float32)

    def differentiate(function: Any, arrays: Any, cotangent: Any) -> Any:
        y, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
        return y, pullback(cotangent)[0]

    have = jax.jit(partial(differentiate, gated_delta_rule))(arrays, cotangent)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (arrays, cotangent))
        want = jax.jit(partial(differentiate, lambda **x: recurrence(**x)[0]))(*wide)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.usefixtures("x64")
def test_states_of_chunks_merge():
    """With every kind of gate, in any grouping."""
    for decay, erase, steps, is_apart in (
        (None, "head", 1, False),
        ("head", None, 1, False),
        ("feature", "head", 1, False),
        ("feature", "feature", 2, True),
        ("head", "head", 3, False),
    ):
        case = Case(90, decay, erase, "head", num_steps=steps, is_apart=is_apart)
        arrays = case.arrays()
        initial = arrays.pop("initial_state")

        def summary(first: int, last: int, arrays: dict, steps: int = steps) -> MatrixState:
            parts = {k: x[:, first * x.shape[1] // 90 :] for k, x in arrays.items()}
            count = {k: (last - first) * x.shape[1] // 90 for k, x in arrays.items()}
            parts = {k: x[:, : count[k]] for k, x in parts.items()}
            return matrix_summary(**parts, num_steps=steps)

        @jax.jit
        def merged(state: MatrixState, arrays: dict) -> list[MatrixState]:
            first, second, third = (summary(*x, arrays) for x in ((0, 40), (40, 41), (41, 90)))
            return [
                state.merge(first).merge(second).merge(third),
                state.merge(first.merge(second.merge(third))),
            ]

        _, whole = recurrence(**arrays, initial_state=initial, num_steps=steps)
        for after in merged(MatrixState(initial), arrays):
            np.testing.assert_allclose(after.matrix, whole, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.usefixtures("x64")
def test_padding_has_no_effect_on_a_summary():
    arrays = Case(60, "feature", "head", "feature").arrays()
    del arrays["initial_state"]
    bounds = np.array([[20, 50]] * BATCH)
    padded = {name: x.copy() for name, x in arrays.items()}
    for x in padded.values():
        x[:, :20], x[:, 50:] = np.nan, np.nan
    have = matrix_summary(**padded, key_value_seq_lengths=bounds)
    want = matrix_summary(**{name: x[:, 20:50] for name, x in arrays.items()})
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_without_gates_it_is_the_numerator_of_linear_attention():
    arrays = Case(50).arrays()
    del arrays["initial_state"]
    y = gated_delta_rule(**arrays, scale=1.0)
    ones = np.ones_like(arrays["value"][..., :1])
    total = gated_delta_rule(**{**arrays, "value": ones}, scale=1.0)
    expected = linear_attention(**arrays, feature_map="identity", epsilon=0)
    np.testing.assert_allclose(y / total, expected, rtol=1e-9)


@pytest.mark.parametrize("op", ["gated", "mlstm", "log", "softmax"])
def test_positive_decays_are_refused(op):
    """Outside of transformations, under which values are unknown."""
    x, decay = np.ones((1, 4, 2, 3), np.float32), np.full((1, 4, 2), 0.1, np.float32)
    calls = {
        "gated": lambda: gated_delta_rule(x, x, x, log_decay=decay),
        "mlstm": lambda: mlstm_attention(x, x, x, log_input_gate=decay, log_forget_gate=decay),
        "log": lambda: log_attention(x, x, x, log_decay=decay),
        "softmax": lambda: dot_product_attention(x, x, x, log_decay=decay, is_causal=True),
    }
    with pytest.raises(ValueError, match=r"must be at most 0, got 0\.1"):
        calls[op]()


@pytest.mark.nightly
def test_a_choice_per_block_does_not_change_results(monkeypatch):
    """Sums of decays are subtracted where they are small; elsewhere they are summed apart."""
    arrays = {k: np.float32(x) for k, x in Case(64, "feature", "head").arrays().items()}
    outputs = []
    try:
        for limit in (1e9, -1.0):
            monkeypatch.setattr(matrix_state, "SMALL_DECAY", limit)
            jax.clear_caches()
            outputs.append(gated_delta_rule(**arrays))
    finally:
        jax.clear_caches()
    assert np.any(outputs[0] != outputs[1])
    np.testing.assert_allclose(*outputs, atol=2e-6)


@pytest.mark.parametrize("case", [Case(70, "head", "head", "head"), Case(70, "feature", "feature")])
def test_heads_of_values_share_queries_and_keys(case):
    """The same as with repeated queries and keys."""
    heads = HEADS // 2
    arrays = {name: np.float32(x) for name, x in case.arrays().items()}
    shared = arrays | {name: arrays[name][:, :, :heads] for name in ("query", "key")}

    def loss(arrays: Any, repeats: int) -> Any:
        repeated = {name: jnp.repeat(arrays[name], repeats, 2) for name in ("query", "key")}
        y, state = gated_delta_rule(**arrays | repeated, return_state=True)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state)), (y, state)

    have, want = (jax.grad(partial(loss, repeats=n), has_aux=True)(shared) for n in (1, 2))
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.max(np.abs(b)))
    gates = {
        x: shared[x]
        for x in ("query", "key", "value", "log_decay", "erase", "write")
        if x in shared
    }
    summary = matrix_summary(**gates)
    merged = MatrixState(jnp.asarray(shared["initial_state"])).merge(summary)
    np.testing.assert_allclose(merged.matrix, want[1][1], atol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_state_without_its_transition_does_not_merge_into_another():
    state = MatrixState.empty((), 1, 2, 3)
    with pytest.raises(ValueError, match=r"other\.transition is None"):
        state.merge(state)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_steps_that_do_not_fit_raise():
    x, key = np.zeros((1, 4, 2, 3), np.float32), np.zeros((1, 8, 2, 3), np.float32)
    for steps in (3, 0, -2):
        with pytest.raises(ValueError, match=f"must have num_steps={steps} steps for each token"):
            gated_delta_rule(x, key, key, num_steps=steps)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.usefixtures("x64")
def test_padding_of_tokens_with_several_steps_has_no_effect(is_apart):
    case = Case(12, "feature", "head", "head", num_steps=2, is_apart=is_apart)
    arrays, bounds = case.arrays(), np.array([[2, 9], [0, 12]])
    want = [
        gated_delta_rule(
            **{
                k: x[i : i + 1, slice(*(b * x.shape[1] // 12 for b in bounds[i]))]
                if k != "initial_state"
                else x[i : i + 1]
                for k, x in arrays.items()
            },
            num_steps=2,
            return_state=True,
        )
        for i in range(2)
    ]
    for name in ("query", "key", "value"):
        x = arrays[name]
        steps = x.shape[1] // 12
        x[0, : 2 * steps], x[0, 9 * steps :] = np.nan, np.nan
    y, state = gated_delta_rule(
        **arrays, key_value_seq_lengths=bounds, num_steps=2, return_state=True
    )
    np.testing.assert_allclose(y[0, 2:9], want[0][0][0], atol=1e-12)
    np.testing.assert_allclose(y[1], want[1][0][0], atol=1e-12)
    np.testing.assert_allclose(state, np.concatenate([x for _, x in want]), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (1, 4, 4, 3)}, "query and key must have the same heads"),
        ({"query": (1, 3, 2, 3)}, "gated_delta_rule needs as many queries as keys"),
        ({"value": (1, 4, 3, 5)}, "the heads of key must divide the heads of value"),
        ({"value": (1, 3, 2, 5)}, "key and value must have the same tokens"),
        ({"log_decay": (1, 4, 3)}, r"log_decay must have shape \(1, 4, 2\) or \(1, 4, 2, 3\)"),
        ({"erase": (1, 4)}, "erase must have shape"),
        ({"write": (1, 4, 2, 3)}, r"write must have shape \(1, 4, 2\) or \(1, 4, 2, 5\)"),
        ({"initial_state": (1, 2, 5, 3)}, r"initial_state must have shape \(1, 2, 3, 5\)"),
        ({"erase_key": (1, 4, 2, 3)}, "erase_key needs erase, the share that is erased"),
        ({"erase_key": (1, 4, 2, 5)}, r"erase_key must have shape \(1, 4, 2, 3\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(change, message):
    shapes = {"query": (1, 4, 2, 3), "key": (1, 4, 2, 3), "value": (1, 4, 2, 5)} | change
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("log_decay", (1, 4, 2), r"log_decay must have shape \(1, 2, 2\) or \(1, 2, 2, 3\)"),
        ("segment_ids", (1, 4), r"segment_ids must have shape \(1, 2\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_shapes_of_arrays_per_token_are_named_as_given(name, shape, message):
    query, key = np.zeros((1, 2, 2, 3), np.float32), np.zeros((1, 4, 2, 3), np.float32)
    given = {name: np.zeros(shape, np.float32 if name == "log_decay" else np.int32)}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(query, key, key, num_steps=2, **given)


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_lengths_in_steps_do_not_overflow(dtype):
    """180 steps are more than int8 has, and no sequence is longer than its tokens."""
    query, key = jnp.ones((1, 100, 1, 2)), jnp.ones((1, 200, 1, 2))
    call = partial(gated_delta_rule, query, key, key, num_steps=2)
    given, wanted = (call(key_value_seq_lengths=jnp.array([n])) for n in (dtype(90), 90))
    np.testing.assert_array_equal(given, wanted)
    assert np.abs(wanted).max() > 0
    with pytest.raises(ValueError, match="key_value_seq_lengths"):
        call(key_value_seq_lengths=jnp.array([90.0]))
    most = jnp.array([np.iinfo(dtype).max])
    np.testing.assert_allclose(call(key_value_seq_lengths=most), call(), rtol=1e-6)
