from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.linear import LinearAttentionState, elu1, linear_attention

pytestmark = pytest.mark.slow

jitted = jax.jit(
    linear_attention, static_argnames=("feature_map", "is_causal", "epsilon", "return_state")
)

PHI = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Case:
    length: int
    batch: tuple[int, ...] = ()
    heads: int = 1
    groups: int = 1
    depth: int = 3
    value_depth: int = 2
    sources: int | None = None  # as many as queries, and causal, when None
    feature_map: str = "elu1"
    has_segments: bool = False
    has_padding: bool = False

    @property
    def is_causal(self) -> bool:
        return self.sources is None

    def arrays(self, seed: int = 0, std: float = 1.0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        sources = self.sources or self.length
        shapes = [(self.length, self.heads, self.depth)]
        shapes += [(sources, self.groups, depth) for depth in (self.depth, self.value_depth)]
        return [std * rng.standard_normal((*self.batch, *shape)) for shape in shapes]

    def options(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        sources = self.sources or self.length
        options: dict[str, Any] = {"is_causal": self.is_causal, "feature_map": self.feature_map}
        if self.has_segments:
            steps = rng.uniform(size=(*self.batch, sources)) < 0.1
            options["segment_ids"] = np.cumsum(steps, -1) % 3  # a number may come again
        if self.has_padding:
            first = rng.integers(0, sources // 3, self.batch)
            last = rng.integers(sources // 2, sources + 1, self.batch)
            options["key_value_seq_lengths"] = np.stack([first, last], -1)
        return options


CASES = (
    Case(1, depth=1, value_depth=1),
    Case(2, batch=(2,), heads=2, groups=2),
    Case(63, batch=(1, 2), heads=4, groups=2, depth=5, value_depth=3),
    Case(65, heads=2, feature_map="relu", has_segments=True),
    Case(100, batch=(2,), heads=2, has_segments=True, has_padding=True),
    Case(521, heads=2, groups=1, depth=4, has_segments=True),
    Case(1031, depth=2, value_depth=4),
    Case(5, sources=37, batch=(2,), heads=2, has_padding=True),
    Case(67, sources=67, batch=(2,), heads=2, groups=2, has_segments=True, has_padding=True),
)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def visible(case: Case, options: dict[str, Any], entry: tuple[int, ...]) -> np.ndarray:
    """`[T, S]`: which keys a query sees."""
    sources = case.sources or case.length
    first, end = 0, sources
    if case.has_padding:
        first, end = options["key_value_seq_lengths"][entry]
    run = np.zeros(sources, int)
    if case.has_segments:
        ids = options["segment_ids"][entry]
        for s in range(first + 1, end):
            run[s] = run[s - 1] + (ids[s] != ids[s - 1])
        run[end:] = run[end - 1]
    seen = np.zeros((case.length, sources), bool)
    seen[:, first:end] = True
    if case.has_segments:
        seen &= run[:, None] == run
    return np.tril(seen) if case.is_causal else seen


def oracle(case: Case, arrays: list[np.ndarray], options: dict[str, Any], epsilon: float):
    """Y by the definition, a query after the other."""
    query, key, value = (x.astype(np.float64) for x in arrays)
    phi, share = PHI[case.feature_map], case.heads // case.groups
    y = np.zeros((*query.shape[:-1], case.value_depth))
    for entry in np.ndindex(*case.batch):
        seen = visible(case, options, entry)
        for t, n in np.ndindex(case.length, case.heads):
            keys, values = (x[entry][seen[t], n // share] for x in (key, value))
            weights = phi(keys) @ phi(query[entry][t, n])
            total = np.sum(weights) + epsilon
            y[entry][t, n] = weights @ values / total if total else 0
    return y


@each_case
@pytest.mark.usefixtures("x64")
def test_values_by_the_definition(case):
    arrays, options = case.arrays(), case.options()
    expected = oracle(case, arrays, options, 1e-6)
    np.testing.assert_allclose(jitted(*arrays, **options), expected, rtol=0, atol=1e-11)
    in_float32 = jitted(*(x.astype(np.float32) for x in arrays), **options)
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.length > 2], ids=str)
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_quadratic_form(case):
    arrays, options = case.arrays(1), case.options(1)
    seen = np.stack([visible(case, options, entry) for entry in np.ndindex(*case.batch)])
    seen = seen.reshape(*case.batch, 1, *seen.shape[1:])
    phi = {"elu1": lambda x: jax.nn.elu(x) + 1, "relu": jax.nn.relu}[case.feature_map]

    def quadratic(query, key, value):
        key, value = (jnp.repeat(x, case.heads // case.groups, -2) for x in (key, value))
        weights = jnp.einsum("...tnf,...snf->...nts", phi(query), phi(key)) * seen
        total = jnp.swapaxes(jnp.sum(weights, -1), -1, -2)[..., None] + 1e-6
        return jnp.einsum("...nts,...snv->...tnv", weights, value) / total

    cotangent = np.random.default_rng(2).standard_normal((*arrays[0].shape[:-1], case.value_depth))
    tested = partial(jitted, **options)
    for have, want in zip(
        jax.vjp(tested, *arrays)[1](jnp.asarray(cotangent)),
        jax.jit(lambda *x: jax.vjp(quadratic, *x)[1](jnp.asarray(cotangent)))(*arrays),
        strict=True,
    ):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-9 * max(1, np.max(np.abs(want))))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["causal", "noncausal"])
def test_published_values_and_gradients(golden, kind):
    case = golden("linear_attention_elu")
    arrays = [jnp.asarray(case[name]) for name in "qkv"]
    y, pullback = jax.vjp(partial(jitted, is_causal=kind == "causal"), *arrays)
    np.testing.assert_allclose(y, case[f"{kind}/out"], rtol=0, atol=1e-10)
    for name, gradient in zip("qkv", pullback(jnp.asarray(case["cotangent"])), strict=True):
        np.testing.assert_allclose(gradient, case[f"{kind}/d{name}"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_published_state_and_small_features(golden):
    case = golden("linear_attention_elu")
    y, state = jitted(*(case[name] for name in "qkv"), epsilon=0, return_state=True)
    np.testing.assert_allclose(y, case["causal/out_no_eps"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.s, case["state/S"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.z, case["state/Z"], rtol=0, atol=1e-10)
    arrays = case["underflow/q"], case["underflow/k"], case["v"]
    np.testing.assert_allclose(jitted(*arrays), case["underflow/out"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "identity", jnp.square])
def test_feature_maps(feature_map):
    case = Case(9, heads=2)
    query, key, value = (np.abs(x).astype(np.float32) for x in case.arrays())
    phi = PHI.get(feature_map, np.square)
    actual = jitted(query, key, value, feature_map=feature_map)
    expected = jitted(phi(query), phi(key), value, feature_map="identity")
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_elu1_keeps_what_is_small():
    x = np.array([-80.0, -20, -1, 0, 3], np.float32)
    np.testing.assert_allclose(elu1(x), PHI["elu1"](x.astype(np.float64)), rtol=1e-6)
    gradient = jax.vmap(jax.grad(elu1))(x)
    np.testing.assert_allclose(gradient, np.exp(np.minimum(x, 0)), rtol=1e-6)


@pytest.mark.parametrize("length", [7, 130])
def test_no_gradient_reaches_the_future(length):
    arrays = [jnp.asarray(x, jnp.float32) for x in Case(length, heads=2).arrays()]
    grad = jax.jit(
        jax.grad(lambda key, value, t: jnp.sum(jitted(arrays[0], key, value)[t]), (0, 1))
    )
    for t in (0, length // 2, length - 2):
        for gradient in grad(*arrays[1:], t):
            np.testing.assert_array_equal(gradient[t + 1 :], 0)
            assert np.abs(gradient[: t + 1]).max(-1).min() > 0


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([1, 64, 70]), max_size=2))
def test_pieces_are_as_the_whole(seed, sizes):
    case = Case(140, batch=(2,), heads=2, has_segments=True)
    arrays = [x.astype(np.float32) for x in case.arrays(seed)]
    ids = case.options(seed)["segment_ids"]
    state = LinearAttentionState.empty((2,), 1, 3, 2)
    whole, end = jitted(*arrays, segment_ids=ids, initial_state=state, return_state=True)
    pieces, bounds = [], np.minimum(np.cumsum([0, *sizes, 140]), 140)
    for index, start in enumerate(bounds[:-1]):
        part = np.s_[:, start : bounds[index + 1]]
        if start and start < 140:  # a piece knows no earlier number: what begins anew starts at 0
            fresh = (ids[:, start] != ids[:, start - 1]).astype(np.float32)
            state = jax.tree.map(
                lambda x, fresh=fresh: x * (1 - fresh).reshape(2, *[1] * (x.ndim - 1)), state
            )
        y, state = jitted(
            *(x[part] for x in arrays),
            segment_ids=ids[part],
            initial_state=state,
            return_state=True,
        )
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=2e-5)
    for have, want in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


def test_token_by_token():
    arrays = [x.astype(np.float32) for x in Case(70, heads=4, groups=2).arrays()]
    whole, end = jitted(*arrays, return_state=True)
    state = LinearAttentionState.empty((), 2, 3, 2)
    for t in range(70):
        y, state = jitted(*(x[t : t + 1] for x in arrays), initial_state=state, return_state=True)
        np.testing.assert_allclose(y, whole[t : t + 1], atol=1e-5)
    np.testing.assert_allclose(state.s, end.s, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.z, end.z, rtol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_through_a_state(is_causal):
    arrays = Case(90, heads=2).arrays()

    def in_two(*arrays):
        _, state = linear_attention(*(x[:40] for x in arrays), return_state=True)
        options = {"initial_state": state, "is_causal": is_causal}
        return linear_attention(*(x[40:] for x in arrays), **options)

    def at_once(query, key, value):
        if is_causal:
            return linear_attention(query, key, value)[40:]
        return linear_attention(query[40:], key, value, is_causal=False)

    def gradients(function):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(*x)))))(arrays)

    for have, want in zip(gradients(in_two), gradients(at_once), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("epsilon", [0, 1e-6])
@pytest.mark.parametrize("feature_map", ["elu1", "relu"])
def test_extreme_inputs_are_finite_in_value_and_gradient(is_causal, epsilon, feature_map):
    for std, seed in ((1000.0, 0), (1e15, 1), (0.0, 2)):
        arrays = [x.astype(np.float32) for x in Case(70, heads=2).arrays(seed, std)]
        options = {"is_causal": is_causal, "epsilon": epsilon, "feature_map": feature_map}
        y, pullback = jax.vjp(partial(jitted, **options), *arrays)
        for x in (y, *pullback(jnp.ones_like(y))):
            assert np.isfinite(x).all()
        assert np.max(np.abs(y)) <= np.max(np.abs(arrays[2])) * (1 + 1e-5)


def test_small_queries_do_not_underflow():
    query, key, value = (x.astype(np.float32) for x in Case(20).arrays())
    key, query = np.abs(key), query - 60
    expected = oracle(Case(20), [query, key, value], {}, 0)
    np.testing.assert_allclose(jitted(query, key, value, epsilon=0), expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("epsilon", [0, 1e-6])
def test_what_sees_nothing_is_zero_with_zero_gradients(is_causal, epsilon):
    arrays = [x.astype(np.float32) for x in Case(5, batch=(3,)).arrays()]
    lengths = np.array([0, 2, 5])
    for x in arrays:
        x[0], x[1, 2:] = np.nan, np.nan
    options = {"is_causal": is_causal, "epsilon": epsilon, "key_value_seq_lengths": lengths}
    y, pullback = jax.vjp(partial(jitted, **options), *arrays)
    np.testing.assert_array_equal(y[0], 0)
    alone = jitted(*(x[1:2, :2] for x in arrays), is_causal=is_causal, epsilon=epsilon)
    np.testing.assert_allclose(y[1, :2], alone[0], atol=1e-6)
    for gradient in pullback(jnp.ones_like(y)):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[0], 0)
    for gradient in pullback(jnp.ones_like(y))[1:]:
        np.testing.assert_array_equal(gradient[1, 2:], 0)


def test_features_of_zero_are_nothing():
    arrays = [x.astype(np.float32) for x in Case(6).arrays()]
    arrays[0] = -np.abs(arrays[0])
    options = {"feature_map": "relu", "epsilon": 0}
    y, pullback = jax.vjp(partial(jitted, **options), *arrays)
    for x in (y, *pullback(jnp.ones_like(y))):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("is_causal", [True, False])
def test_no_tokens(is_causal):
    query, key, value = (np.zeros((2, 0, 2, 3), np.float32) for _ in range(3))
    ids = np.zeros((2, 0), np.int32)
    for options in ({}, {"segment_ids": ids}):
        y, state = jitted(query, key, value, is_causal=is_causal, return_state=True, **options)
        assert y.shape == (2, 0, 2, 3)
        np.testing.assert_array_equal(state.s, np.zeros((2, 2, 3, 3)))
    if not is_causal:
        queries = np.ones((2, 4, 2, 3), np.float32)
        np.testing.assert_array_equal(jitted(queries, key, value, is_causal=False), 0 * queries)


def test_padding_does_not_reach_the_state():
    arrays = [x.astype(np.float32) for x in Case(70, batch=(2,)).arrays()]
    ids = (np.arange(70) > 20).astype(np.int32) * np.ones((2, 1), np.int32)
    ids[:, 50:] = 7
    options = {"segment_ids": ids, "key_value_seq_lengths": np.array([50, 50])}
    _, padded = jitted(*arrays, return_state=True, **options)
    _, cut = jitted(*(x[:, :50] for x in arrays), segment_ids=ids[:, :50], return_state=True)
    _, last = jitted(*(x[:, 21:50] for x in arrays), return_state=True)
    for state in (cut, last):
        for have, want in zip(jax.tree.leaves(padded), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_transformations_and_half_precision():
    case = Case(66, batch=(3,), heads=2, has_segments=True, has_padding=True)
    arrays, options = [x.astype(np.float32) for x in case.arrays()], case.options()
    arrays_of_options = [options.pop(name) for name in ("segment_ids", "key_value_seq_lengths")]

    def call(query, key, value, ids, lengths):
        return linear_attention(
            query, key, value, segment_ids=ids, key_value_seq_lengths=lengths, **options
        )

    whole = jax.jit(call)(*arrays, *arrays_of_options)
    np.testing.assert_allclose(linear_attention(*arrays), jitted(*arrays), atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(call))(*arrays, *arrays_of_options), whole, atol=1e-6
    )
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    y = jax.jit(call)(*half, *arrays_of_options)
    assert y.dtype == jnp.bfloat16
    expected = jax.jit(call)(*(x.astype(jnp.float32) for x in half), *arrays_of_options)
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


X = np.ones((2, 6, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, X[:, :5], X[:, :5]), {}, "as many queries as keys"),
        ((X, X[..., :2], X), {}, "same depth"),
        ((X, X, X.astype(int)), {}, "value must be floating point"),
        ((X, X, X), {"feature_map": "exp"}, "feature_map must be .* heinsen_attention"),
        ((X, X, X), {"feature_map": lambda x: x[..., 0, :]}, "feature_map must change the last"),
        ((X, X, X), {"segment_ids": X[..., 0, 0]}, "segment_ids must be of a kind of integer"),
        ((X, X, X), {"key_value_seq_lengths": np.ones(3, int)}, "key_value_seq_lengths must have"),
        (
            (X, X, X),
            {"initial_state": LinearAttentionState.empty((2,), 2, 4, 3)},
            r"initial_state.s must have shape \(2, 2, 3, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*arrays, **options)


def test_segments_of_other_queries_are_refused():
    ids = np.zeros((2, 6), int)
    with pytest.raises(NotImplementedError, match="segments of the queries"):
        linear_attention(X[:, :5], X, X, is_causal=False, segment_ids=ids)
