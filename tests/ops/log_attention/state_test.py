import dataclasses
import pickle
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from tests.ops.log_attention.cases import Case, assert_within, averages, random_inputs

SEEDS = st.integers(0, 2**32 - 1)
STDS = st.sampled_from([1.0, 30.0, 1000.0])
SHAPE = ((2,), 2, 3, 5)  # batch, heads, key depth, value depth
CASE = Case(6, batch=(2,), num_heads=4, num_kv_heads=2, key_depth=3, value_depth=5)
EMPTY = LogAttentionState.empty(*SHAPE)


@jax.jit
def state_of(key, log_value) -> LogAttentionState:
    return EMPTY.absorb(key, log_value)


def random_state(seed: int, std: float = 1.0) -> LogAttentionState:
    return state_of(*random_inputs(CASE, seed, std)[1:3])


NO_AVERAGES = HeinsenAttentionState.empty(*SHAPE)


@jax.jit
def linear_state_of(query, key, value) -> HeinsenAttentionState:
    return heinsen_attention(query, key, value, return_state=True)[1]


def linear_state(seed: int) -> HeinsenAttentionState:
    return linear_state_of(*random_inputs(CASE, seed)[:3])


@jax.jit
def complex_state_of(query, key, value) -> LogAttentionState:
    return log_attention(query, key, jnp.log(value.astype(jnp.complex64)), return_state=True)[1]


def complex_state(seed: int) -> LogAttentionState:
    return complex_state_of(*random_inputs(CASE, seed)[:3])


def assert_equal(a: LogAttentionState, b: LogAttentionState, bound: float) -> None:
    assert_within(a.log_z, b.log_z, bound)
    assert_within(np.real(a.log_s), np.real(b.log_s), bound)
    np.testing.assert_array_equal(np.imag(a.log_s), np.imag(b.log_s))


def assert_same_means(a: HeinsenAttentionState, b: HeinsenAttentionState) -> None:
    assert_within(a.mean, b.mean, 1e-5)
    assert_within(a.log_z, b.log_z, 1e-5)


@given(SEEDS, STDS)
def test_merge_is_commutative_and_associative_with_a_neutral_element(seed, std):
    a, b, c = (random_state((seed + i) % 2**32, std) for i in range(3))
    assert_equal(a.merge(b), b.merge(a), 1e-30)
    assert_equal(a.merge(b).merge(c), a.merge(b.merge(c)), 2e-6 * (1 + std))
    assert_equal(a.merge(EMPTY), a, 1e-30)
    assert_equal(EMPTY.merge(a), a, 1e-30)


@given(SEEDS)
def test_linear_states_merge_likewise(seed):
    a, b, c = (linear_state((seed + i) % 2**32) for i in range(3))
    assert_same_means(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same_means(a.merge(b), b.merge(a))
    assert_same_means(a.merge(NO_AVERAGES), a)
    assert_same_means(NO_AVERAGES.merge(a), a)


@pytest.mark.nightly
@given(SEEDS)
def test_complex_states_merge_like_those_of_their_values(seed):
    a, b = (complex_state((seed + i) % 2**32) for i in range(2))
    merged = linear_state(seed).merge(linear_state((seed + 1) % 2**32))
    assert_same_means(averages(a.merge(b)), merged)
    assert_same_means(averages(a.merge(EMPTY)), averages(a))


@given(SEEDS, st.integers(0, 6))
def test_a_linear_state_equals_heinsen_attention(seed, split):
    query, key, value, _ = random_inputs(CASE, seed)
    first, second = (NO_AVERAGES.absorb(key[:, x], value[:, x]) for x in np.s_[:split, split:])
    assert_same_means(first.merge(second), linear_state(seed))
    y = first.merge(second).attend(query[:, -1:])
    expected = heinsen_attention(query[:, -1:], key, value, is_causal=False)
    assert_within(y, expected, 1e-5)


@given(SEEDS, STDS, st.integers(0, 6))
def test_state_of_a_union_is_the_merge_of_the_states(seed, std, split):
    _, key, log_value, _ = random_inputs(CASE, seed, std)
    parts = [state_of(key[:, part], log_value[:, part]) for part in np.s_[:split, split:]]
    assert_equal(parts[0].merge(parts[1]), state_of(key, log_value), 2e-6 * (1 + std))


@given(SEEDS, STDS)
def test_order_of_tokens_does_not_matter(seed, std):
    _, key, log_value, _ = random_inputs(CASE, seed, std)
    order = np.random.default_rng(seed).permutation(CASE.length)
    shuffled = state_of(key[:, order], log_value[:, order])
    assert_equal(shuffled, state_of(key, log_value), 2e-6 * (1 + std))


def test_absorbing_more_tokens_than_a_block():
    case = Case(150, batch=(2,), num_heads=2, num_kv_heads=2, value_depth=5)
    _, key, log_value, _ = random_inputs(case, 0)
    terms = (key[..., :, None] + log_value[..., None, :]).astype(np.float64)
    state = state_of(key, log_value)
    assert_within(state.log_s, np.logaddexp.reduce(terms, axis=1), 5e-6)
    assert_within(state.log_z, np.logaddexp.reduce(key.astype(np.float64), axis=1), 5e-6)


@pytest.mark.parametrize("empty", [EMPTY, NO_AVERAGES], ids=["log", "linear"])
def test_half_precision_is_absorbed_in_float32(empty):
    _, key, value, _ = jax.tree.map(jnp.bfloat16, random_inputs(CASE, 0))
    log_decay = jnp.full(key.shape[:3], -0.003, jnp.bfloat16)
    rounded = jax.tree.map(np.float32, (key, value, log_decay))
    given, wanted = empty.absorb(key, value, log_decay), empty.absorb(*rounded)
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("empty", [EMPTY, NO_AVERAGES], ids=["log", "linear"])
def test_a_state_that_absorbs_float64_keeps_its_dtype(empty):
    """Also over several blocks."""
    _, key, value, _ = random_inputs(dataclasses.replace(CASE, length=150), 0)
    after = empty.absorb(np.float64(key), np.float64(value))
    assert {x.dtype for x in jax.tree.leaves(after)} == {np.dtype("float32")}


@pytest.mark.parametrize("length", [1, 6, 150])
def test_attend_equals_log_attention(length):
    query = random_inputs(Case(length, batch=(2,), num_heads=4, value_depth=5), 1).query
    _, key, log_value, _ = random_inputs(CASE, 0)
    read = partial(log_attention, is_causal=False, implementation="reference")
    expected = jax.jit(read)(query, key, log_value)
    log_y = jax.jit(LogAttentionState.attend)(state_of(key, log_value), query)
    assert_within(log_y, expected, 5e-6)


def test_attending_to_an_empty_state_is_log_zero():
    query = jnp.ones((2, 6, 4, 3))
    log_y, pullback = jax.vjp(lambda query, state: state.attend(query), query, EMPTY)
    np.testing.assert_array_equal(log_y, np.full((2, 6, 4, 5), -np.inf))
    for gradient in jax.tree.leaves(pullback(jnp.ones_like(log_y))):
        np.testing.assert_array_equal(gradient, 0)


def test_merging_empty_states_has_zero_gradients():
    merged, pullback = jax.vjp(lambda a, b: a.merge(b), EMPTY, EMPTY)
    np.testing.assert_array_equal(merged.log_s, -np.inf)
    for gradient in jax.tree.leaves(pullback(jax.tree.map(jnp.ones_like, merged))):
        np.testing.assert_array_equal(gradient, 0)


def test_empty_is_log_zero_of_the_given_type():
    state = LogAttentionState.empty((7, 1), 2, 3, 5, jnp.complex64)
    assert state.log_s.shape == (7, 1, 2, 3, 5)
    assert state.log_z.shape == (7, 1, 2, 3)
    assert state.log_s.dtype == jnp.complex64
    assert state.log_z.dtype == jnp.float32
    assert np.isneginf(np.real(state.log_s)).all()


def test_a_state_is_a_pytree_of_two_arrays():
    leaves, structure = jax.tree.flatten(random_state(0))
    assert [leaf.shape for leaf in leaves] == [(2, 2, 3, 5), (2, 2, 3)]
    assert isinstance(jax.tree.unflatten(structure, leaves), LogAttentionState)


def test_a_state_of_averages_is_real_and_half_the_bytes_of_complex_logs():
    state, logs = linear_state(0), complex_state(0)
    assert state.mean.dtype == jnp.float32
    assert 2 * state.mean.nbytes == logs.log_s.nbytes


def test_log_s_of_signed_values_is_the_complex_logarithm():
    _, key, value, _ = random_inputs(CASE, 0)
    weights = np.exp(key.astype(np.float64))
    expected = np.einsum("bsgk,bsgv->bgkv", weights, value)
    np.testing.assert_allclose(np.exp(np.asarray(complex_state(0).log_s)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "shapes", "message"),
    [
        ("absorb", [(2, 6, 2, 4), (2, 6, 2, 5)], r"key of shape \(2, 6, 2, 4\) does not fit"),
        ("absorb", [(2, 6, 2, 3), (2, 1, 2, 5)], "must have the same number of tokens"),
        ("absorb", [(2, 6, 1, 3), (2, 6, 1, 5)], "key of shape .* 2 key/value heads and depth 3"),
        ("absorb", [(2, 6, 2, 3), (2, 6, 2, 3)], "log_value of shape .* expected .*heads, 5"),
        ("absorb", [(6, 2, 3), (6, 2, 5)], r"key of shape \(6, 2, 3\) .* batch shape \(2,\)"),
        ("attend", [(2, 6, 3, 3)], r"query of shape \(2, 6, 3, 3\) does not fit"),
        ("attend", [(2, 3)], "query of shape .* does not fit"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_arrays_of_wrong_shapes_raise(method, shapes, message):
    with pytest.raises(ValueError, match=message):
        getattr(EMPTY, method)(*(jnp.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((3,), -1.0, r"log_decay must have shape \(3, 3\) or \(3, 3, 1\), got \(3,\)"),
        ((3, 2), -1.0, r"log_decay must have shape \(3, 3\) or"),
        ((3, 3), 1.0, "log_decay must be at most 0, got 1"),
    ],
)
@pytest.mark.parametrize("kind", [LogAttentionState, HeinsenAttentionState])
@pytest.mark.usefixtures("unchecked")
def test_decays_of_wrong_shapes_or_signs_raise(kind, shape, value, message):
    key = jnp.zeros((3, 3, 1))
    with pytest.raises(ValueError, match=message):
        kind.empty((), 3, 1, 1).absorb(key, key, jnp.full(shape, value))


def decayed_tokens(seed: int, std: float = 1.0):
    """Return key, log_value and decays by key feature, up to complete decay."""
    _, key, log_value, _ = random_inputs(CASE, seed, std)
    rng = np.random.default_rng(seed)
    log_decay = -rng.exponential(rng.choice([0.1, 10]), key.shape).astype(np.float32)
    log_decay[rng.uniform(size=key.shape) < 0.1] = -np.inf
    return key, log_value, log_decay


absorb = jax.jit(LogAttentionState.absorb)
merge = jax.jit(LogAttentionState.merge)


def assert_same(a: LogAttentionState, b: LogAttentionState, bound: float, std: float = 1) -> None:
    """Assert equality up to the rounding of the summands, since sums of large numbers may be
    small."""
    for have, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_within(have, want, bound * (std + np.abs(np.where(np.isneginf(want), 0, want))))


@given(SEEDS, STDS)
def test_with_decay_merge_is_associative_and_keeps_the_order(seed, std):
    tokens = [decayed_tokens((seed + i) % 2**32, std) for i in range(3)]
    a, b, c = (absorb(EMPTY, *x) for x in tokens)
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)), 2e-6, std)
    whole = absorb(EMPTY, *(np.concatenate(x, 1) for x in zip(*tokens, strict=True)))
    assert_same(merge(merge(a, b), c), whole, 5e-6, std)
    assert_same(merge(EMPTY, a), a, 1e-30)
    assert_same(merge(a, EMPTY), a, 1e-30)


@given(SEEDS, STDS, st.booleans(), st.permutations(range(6)), st.data())
def test_every_tree_of_merges_gives_the_same_state(seed, std, decays, order, data):
    """Without decay, the order of the chunks does not matter either."""
    tokens = decayed_tokens(seed, std)[: 3 if decays else 2]
    whole = absorb(EMPTY, *tokens)
    order = range(6) if decays else order
    states = [absorb(EMPTY, *(x[:, i : i + 1] for x in tokens)) for i in order]
    while len(states) > 1:
        i = data.draw(st.integers(0, len(states) - 2))
        states[i : i + 2] = [merge(*states[i : i + 2])]
    assert_same(states[0], whole, 5e-6, std)


absorb_values = jax.jit(HeinsenAttentionState.absorb)


@given(SEEDS)
def test_linear_states_with_decay_merge_into_that_of_all_tokens(seed):
    tokens = [decayed_tokens((seed + i) % 2**32) for i in range(2)]
    first, second = (absorb_values(NO_AVERAGES, *x) for x in tokens)
    whole = absorb_values(NO_AVERAGES, *(np.concatenate(x, 1) for x in zip(*tokens, strict=True)))
    merged = first.merge(second)
    gone = np.isneginf(whole.log_z)
    assert_within(np.where(gone, 0, merged.log_z), np.where(gone, 0, whole.log_z), 2e-5)
    np.testing.assert_array_equal(np.isneginf(merged.log_z), gone)
    assert_within(merged.mean, whole.mean, 2e-5)
    assert_within(first.merge(NO_AVERAGES).mean, first.mean, 1e-30)


def test_with_decay_the_order_counts():
    a, b = (absorb(EMPTY, *decayed_tokens(seed)) for seed in (1, 2))
    assert not np.allclose(merge(a, b).log_z, merge(b, a).log_z, atol=0.1)


@given(SEEDS, st.integers(0, 6))
def test_absorb_with_decay_continues_from_the_state(seed, split):
    tokens = decayed_tokens(seed)
    first, second = ([x[:, part] for x in tokens] for part in np.s_[:split, split:])
    assert_same(EMPTY.absorb(*first).absorb(*second), absorb(EMPTY, *tokens), 5e-6)


@pytest.mark.parametrize("implementation", ["reference", "scan", "chunked"])
@pytest.mark.parametrize("per_feature", [True, False])
def test_log_attention_returns_the_state_of_absorb(implementation, per_feature):
    key, log_value, log_decay = decayed_tokens(0)
    log_decay = log_decay if per_feature else log_decay[..., 0]
    attend = partial(log_attention, return_state=True, implementation=implementation)
    _, state = jax.jit(attend)(key, key, log_value, log_decay=log_decay)
    assert_same(state, absorb(EMPTY, key, log_value, log_decay), 5e-6)


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_a_step_decays_the_state_before_it(function):
    tokens = decayed_tokens(0)
    before = EMPTY if function is log_attention else NO_AVERAGES
    before = before.absorb(*(x[:, :5] for x in tokens))
    key, value, log_decay = (x[:, 5:] for x in tokens)

    def step(implementation):
        return function(
            key,
            key,
            value,
            log_decay=log_decay,
            initial_state=before,
            return_state=True,
            implementation=implementation,
        )

    for have, want in zip(*map(jax.tree.leaves, (step("scan"), step("reference"))), strict=True):
        assert_within(have, want, 5e-6)


def test_padding_does_not_decay_the_state():
    tokens, bounds = decayed_tokens(0), np.array([[1, 4], [0, 5]])
    key, value, log_decay = (jnp.asarray(x) for x in tokens)
    options = {"return_state": True, "implementation": "reference"}
    _, state = log_attention(
        key, key, value, log_decay=log_decay, key_value_seq_lengths=bounds, **options
    )
    for row, (start, end) in enumerate(bounds):
        alone = LogAttentionState.empty((), *SHAPE[1:]).absorb(*(x[row, start:end] for x in tokens))
        assert_same(jax.tree.map(itemgetter(row), state), alone, 5e-6)


@pytest.mark.nightly
def test_a_prefix_has_many_continuations():
    """The state of a shared prompt is computed once, and continued several times."""
    inputs = random_inputs(Case(40, batch=(3,), num_heads=2, value_depth=5), 0)
    query, key, log_value = inputs[:3]
    prompt = [x[:1, :30] for x in (query, key, log_value)]
    _, state = log_attention(*prompt, return_state=True)
    shared = jax.tree.map(lambda x: jnp.repeat(x, 3, 0), state)
    rest = [x[:, 30:] for x in (query, key, log_value)]
    log_y = log_attention(*rest, initial_state=shared)
    for i in range(3):
        whole = [np.concatenate([p, r[i : i + 1]], 1) for p, r in zip(prompt, rest, strict=True)]
        assert_within(log_y[i : i + 1], log_attention(*whole)[:, 30:], 5e-6)


@pytest.mark.nightly
def test_chunks_of_a_prompt_are_absorbed_independently_and_merged():
    """Map and reduce: chunks of a prompt in parallel, then a tree of merges."""
    _, key, log_value, _ = random_inputs(Case(96, batch=(2,), num_heads=2, value_depth=5), 0)
    empty = LogAttentionState.empty((2,), 1, 3, 5)
    chunks = [x.reshape(2, 8, 12, *x.shape[2:]).swapaxes(0, 1) for x in (key, log_value)]
    states = jax.vmap(empty.absorb)(*chunks)
    prefixes = jax.lax.associative_scan(jax.vmap(LogAttentionState.merge), states)
    for i in range(8):
        prefix = jax.tree.map(lambda x, i=i: x[i], prefixes)
        stop = 12 * (i + 1)
        assert_same(prefix, absorb(empty, key[:, :stop], log_value[:, :stop]), 5e-6)


def test_states_serialize(tmp_path):
    state = absorb(EMPTY, *decayed_tokens(0))
    assert_same(pickle.loads(pickle.dumps(state)), state, 1e-30)
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    np.savez(tmp_path / "state.npz", **fields)
    with np.load(tmp_path / "state.npz") as saved:
        assert_same(LogAttentionState(**saved), state, 1e-30)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.parametrize(
    ("of_inputs", "of_state"),
    [
        pytest.param(jnp.bfloat16, jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param(jnp.float64, jnp.float32, marks=pytest.mark.nightly),
        (jnp.float32, jnp.float64),
    ],
)
def test_a_state_keeps_its_dtype(function, of_inputs, of_state):
    """Required for loops. Sums are computed in the wider dtype, at least float32."""
    inputs = [x.astype(of_inputs) for x in random_inputs(CASE, 0)[:3]]
    kind = LogAttentionState if function is log_attention else HeinsenAttentionState
    state = kind.empty(*SHAPE, of_state)
    options = {"return_state": True, "implementation": "chunked"}
    y, after = function(*inputs, initial_state=state, **options)
    assert y.dtype == of_inputs
    assert {x.dtype for x in jax.tree.leaves(after)} == {np.dtype(of_state)}
    y, _ = function(*inputs, initial_state=after, **options)
    expected, _ = function(*(jnp.concatenate([x, x], -3) for x in inputs), **options)
    bound = 0.1 if of_state == jnp.bfloat16 else 1e-5
    assert_within(y.astype(float), expected[..., CASE.length :, :, :].astype(float), bound)
