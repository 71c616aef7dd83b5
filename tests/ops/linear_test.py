from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.linear import LinearAttentionState, elu1, linear_attention

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
    sources: int | None = None  # None: as many as queries, and causal
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
            options["segment_ids"] = np.cumsum(steps, -1) % 3  # an id may be repeated
        if self.has_padding:
            first = rng.integers(0, sources // 3, self.batch)
            last = rng.integers(sources // 2, sources + 1, self.batch)
            options["key_value_seq_lengths"] = np.stack([first, last], -1)
        return options


CASES = (
    Case(1, depth=1, value_depth=1),
    Case(63, batch=(1, 2), heads=4, groups=2, depth=5, value_depth=3),
    Case(65, heads=2, feature_map="relu", has_segments=True),
    Case(100, batch=(2,), heads=2, has_segments=True, has_padding=True),
    Case(521, heads=2, groups=1, depth=4, has_segments=True),
    Case(5, sources=37, batch=(2,), heads=2, has_padding=True),
    Case(67, sources=67, batch=(2,), heads=2, groups=2, has_segments=True, has_padding=True),
)
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.nightly] * (case.length in (1, 63)), id=str(case))
        for case in CASES
    ],
)


def visible(case: Case, options: dict[str, Any], entry: tuple[int, ...]) -> np.ndarray:
    """Return the mask of visible keys `[T, S]`."""
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
    visible_mask = np.zeros((case.length, sources), bool)
    visible_mask[:, first:end] = True
    if case.has_segments:
        visible_mask &= run[:, None] == run
    return np.tril(visible_mask) if case.is_causal else visible_mask


def oracle(case: Case, arrays: list[np.ndarray], options: dict[str, Any], epsilon: float):
    """Y by definition, query by query."""
    query, key, value = (x.astype(np.float64) for x in arrays)
    phi, share = PHI[case.feature_map], case.heads // case.groups
    y = np.zeros((*query.shape[:-1], case.value_depth))
    for entry in np.ndindex(*case.batch):
        visible_mask = visible(case, options, entry)
        for t, n in np.ndindex(case.length, case.heads):
            keys, values = (x[entry][visible_mask[t], n // share] for x in (key, value))
            weights = phi(keys) @ phi(query[entry][t, n])
            total = np.sum(weights) + epsilon
            y[entry][t, n] = weights @ values / total if total else 0
    return y


def differentiate(function, arrays, cotangent):
    """Output and gradients, compiled together."""

    @jax.jit
    def both(arrays, cotangent):
        y, pullback = jax.vjp(function, *arrays)
        return y, *pullback(cotangent)

    return both(arrays, jnp.asarray(cotangent))


@each_case
@pytest.mark.usefixtures("x64")
def test_values_and_gradients_by_the_definition(case):
    arrays, options = case.arrays(), case.options()
    visible_mask = np.stack([visible(case, options, entry) for entry in np.ndindex(*case.batch)])
    visible_mask = visible_mask.reshape(*case.batch, 1, *visible_mask.shape[1:])
    phi = {"elu1": lambda x: jax.nn.elu(x) + 1, "relu": jax.nn.relu}[case.feature_map]

    def quadratic(query, key, value):
        key, value = (jnp.repeat(x, case.heads // case.groups, -2) for x in (key, value))
        weights = jnp.einsum("...tnf,...snf->...nts", phi(query), phi(key)) * visible_mask
        total = jnp.swapaxes(jnp.sum(weights, -1), -1, -2)[..., None] + 1e-6
        return jnp.einsum("...nts,...snv->...tnv", weights, value) / total

    cotangent = np.random.default_rng(2).standard_normal((*arrays[0].shape[:-1], case.value_depth))
    y, *gradients = differentiate(partial(linear_attention, **options), arrays, cotangent)
    expected = oracle(case, arrays, options, 1e-6)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-11)
    _, *expected_gradients = differentiate(quadratic, arrays, cotangent)
    for have, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-9 * max(1, np.max(np.abs(want))))
    in_float32 = jitted(*(x.astype(np.float32) for x in arrays), **options)
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["causal", "noncausal"])
def test_published_values_and_gradients(golden, kind):
    case = golden("linear_attention_elu")
    arrays = [jnp.asarray(case[name]) for name in "qkv"]
    attention = partial(linear_attention, is_causal=kind == "causal")
    y, *gradients = differentiate(attention, arrays, case["cotangent"])
    np.testing.assert_allclose(y, case[f"{kind}/out"], rtol=0, atol=1e-10)
    for name, gradient in zip("qkv", gradients, strict=True):
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


def test_elu1_keeps_small_values():
    x = np.array([-80.0, -20, -1, 0, 3], np.float32)
    np.testing.assert_allclose(elu1(x), PHI["elu1"](x.astype(np.float64)), rtol=1e-6)
    gradient = jax.vmap(jax.grad(elu1))(x)
    np.testing.assert_allclose(gradient, np.exp(np.minimum(x, 0)), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_a_state_before_bidirectional_attention():
    arrays = Case(90, heads=2).arrays()

    def in_two(*arrays):
        _, state = linear_attention(*(x[:40] for x in arrays), return_state=True)
        options = {"initial_state": state, "is_causal": False}
        return linear_attention(*(x[40:] for x in arrays), **options)

    def in_one(query, key, value):
        return linear_attention(query[40:], key, value, is_causal=False)

    def gradients(function):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(*x)))))(arrays)

    for have, want in zip(gradients(in_two), gradients(in_one), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-12)


@pytest.mark.parametrize(("feature_map", "epsilon"), [("elu1", 1e-6), ("relu", 0)])
def test_extreme_inputs_have_averages_and_finite_gradients(feature_map, epsilon):
    options = {"epsilon": epsilon, "feature_map": feature_map}
    tested = jax.jit(partial(differentiate, partial(linear_attention, **options)))
    for std, seed in ((1000.0, 0), (1e15, 1), (0.0, 2)):
        arrays = [x.astype(np.float32) for x in Case(70, heads=2).arrays(seed, std)]
        y, *gradients = tested(arrays, np.ones((70, 2, 2), np.float32))
        for x in (y, *gradients):
            assert np.isfinite(x).all()
        assert np.max(np.abs(y)) <= np.max(np.abs(arrays[2])) * (1 + 1e-5)


def test_small_queries_do_not_underflow():
    query, key, value = (x.astype(np.float32) for x in Case(20).arrays())
    key, query = np.abs(key), query - 60
    expected = oracle(Case(20), [query, key, value], {}, 0)
    np.testing.assert_allclose(jitted(query, key, value, epsilon=0), expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_without_visible_keys_are_zero_without_epsilon(is_causal):
    arrays = [x.astype(np.float32) for x in Case(5, batch=(2,)).arrays()]
    options = {"is_causal": is_causal, "epsilon": 0, "key_value_seq_lengths": np.array([0, 5])}
    for x in differentiate(partial(linear_attention, **options), arrays, np.ones((2, 5, 1, 2))):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x[0], 0)
        assert np.any(x[1] != 0)


def test_features_of_zero_have_no_effect():
    arrays = [x.astype(np.float32) for x in Case(6).arrays()]
    arrays[0] = -np.abs(arrays[0])
    options = {"feature_map": "relu", "epsilon": 0}
    y, pullback = jax.vjp(partial(jitted, **options), *arrays)
    for x in (y, *pullback(jnp.ones_like(y))):
        np.testing.assert_array_equal(x, 0)


def test_queries_without_keys_are_zero():
    nothing, queries = np.zeros((2, 0, 2, 3), np.float32), np.ones((2, 4, 2, 3), np.float32)
    y = jitted(queries, nothing, nothing, is_causal=False)
    np.testing.assert_array_equal(y, np.zeros((2, 4, 2, 3)))


X = np.ones((2, 6, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, X[:, :5], X[:, :5]), {}, "as many queries as keys"),
        ((X, X[..., :2], X), {}, "same depth"),
        ((X, X, X.astype(int)), {}, "value must be floating point"),
        ((X, X, X), {"feature_map": "exp"}, "feature_map must be .* heinsen_attention"),
        (
            (X, X, X),
            {"feature_map": lambda x: x[..., 0, :]},
            "feature_map must change only the last",
        ),
        ((X, X, X), {"segment_ids": X[..., 0, 0]}, "segment_ids must have a dtype of kind integer"),
        ((X, X, X), {"key_value_seq_lengths": np.ones(3, int)}, "key_value_seq_lengths must have"),
        (
            (X, X, X),
            {"initial_state": LinearAttentionState.empty((2,), 2, 4, 3)},
            r"initial_state.s must have shape \(2, 2, 3, 3\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*arrays, **options)


@pytest.mark.usefixtures("unchecked")
def test_segments_of_other_queries_are_refused():
    ids = np.zeros((2, 6), int)
    with pytest.raises(NotImplementedError, match="ids of queries are not given"):
        linear_attention(X[:, :5], X, X, is_causal=False, segment_ids=ids)
