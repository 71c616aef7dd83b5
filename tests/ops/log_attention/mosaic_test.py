"""GPU kernels: run on a GPU if available, otherwise interpreted; lowered everywhere."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from heinsen_jax.ops import heinsen_attention, log_attention
from heinsen_jax.ops.log_attention import mosaic, reference
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.mosaic import Fused, parts, streams
from heinsen_jax.ops.log_attention.scan import Scan
from heinsen_jax.ops.log_attention.variants import AttentionPasses
from tests.ops.log_attention.cases import assert_within
from tests.ops.log_attention.kernel_choice_test import kernels_in

# Interpreted products warn about the infinities and NaNs that kernels are tested for.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
slow = pytest.mark.nightly
each_seed = pytest.mark.parametrize("seed", [0], ids="seed {}".format)
each_function = pytest.mark.parametrize("function", [log_attention, heinsen_attention])

Tree = Any  # a tree of arrays of NumPy or JAX


@dataclass(frozen=True)
class Case:
    """Shapes and options of a call: segments, decay by head, or decay by feature."""

    length: int
    batch: int = 1
    groups: int = 1
    heads: int = 1
    key_depth: int = 32
    value_depth: int = 32
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nothing:
    """Implementation that returns NaN."""

    def causal(self, inputs: Inputs, state: Averages, *, is_log: bool) -> Tree:
        shapes = jax.eval_shape(partial(Scan().causal, is_log=is_log), inputs, state)
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

    def bidirectional(self, inputs: Inputs, state: Averages, *, is_log: bool) -> Tree:
        raise NotImplementedError


KERNELS = Fused(otherwise=Nothing())


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a supported GPU, or JAX's interpreter."""
    if mosaic.is_available():
        yield
        return
    pallas: Any = mosaic_gpu  # no interpreter in JAX 0.10
    if not hasattr(pallas, "InterpretGPUParams"):
        pytest.skip("kernels are interpreted by JAX 0.11 or newer, and no GPU is available")
    monkeypatch.setattr(mosaic, "is_available", lambda: True)
    monkeypatch.setattr(streams, "PLATFORM", "cpu")
    with pallas.force_gpu_interpret_mode(pallas.InterpretGPUParams()):
        yield


def draw(case: Case, seed: int, std: float = 1.0) -> tuple[Inputs, Averages]:
    """Return normal float32 arrays, in log or linear space; the state is that of earlier tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (std * rng.standard_normal((case.batch, *shape))).astype(np.float32)

    tokens = case.length, case.groups
    decay = starts = None
    if "decay per head" in case.options:
        decay = -0.2 * np.abs(normal(*tokens, 1))
    if "decay per feature" in case.options:
        decay = -0.2 * np.abs(normal(*tokens, case.key_depth))
    if "segments" in case.options:
        starts = rng.uniform(size=(case.batch, case.length)) < 0.05
        starts[:, 0] = False
    inputs = Inputs(
        normal(*tokens, case.heads, case.key_depth),
        normal(*tokens, case.key_depth),
        normal(*tokens, case.value_depth),
        decay,
        starts,
    )
    sizes = case.groups, case.key_depth
    return inputs, Averages(normal(*sizes), normal(*sizes, case.value_depth))


def differentiate(function: Callable, inputs: Inputs, state: Averages, seed: int) -> Tree:
    """Return outputs of function(inputs, state), and cotangents of inputs and of the state."""

    @jax.jit
    def outputs_and_cotangents(inputs: Inputs, state: Averages, d_outputs: Tree) -> Tree:
        def call(inputs: Inputs, state: Averages) -> Tree:
            return function(replace(inputs, starts=starts), state)

        starts = inputs.starts
        outputs, pullback = jax.vjp(call, replace(inputs, starts=None), state)
        d_outputs = jax.tree.map(lambda d, x: jnp.asarray(d, x.dtype), d_outputs, outputs)
        return outputs, pullback(d_outputs)

    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(function, inputs, state)
    d_outputs = jax.tree.map(lambda x: rng.standard_normal(x.shape), shapes)
    return jax.tree.map(np.asarray, outputs_and_cotangents(inputs, state, d_outputs))


def by(implementation: AttentionPasses, *arrays: Tree, is_log: bool, seed: int = 0) -> Tree:
    return differentiate(partial(implementation.causal, is_log=is_log), *arrays, seed)


def oracle(inputs: Inputs, state: Averages, *, is_log: bool, seed: int = 0) -> Tree:
    """The definition in float64; log Z is that of `Scan`."""

    def define(inputs: Inputs, state: Averages) -> Tree:
        y, after = reference.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            state,
            is_log=is_log,
            is_causal=True,
            segment_ids=None if inputs.starts is None else jnp.cumsum(inputs.starts, 1),
            log_decay=inputs.log_decay,
        )
        return y, Scan().causal(inputs, state, is_log=is_log)[1], after

    def in_float64(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x) if x.dtype == bool else jnp.asarray(x, jnp.float64)

    with jax.enable_x64(True):
        return differentiate(define, *jax.tree.map(in_float64, (inputs, state)), seed)


def assert_exact(actual: Tree, expected: Tree, size: float) -> None:
    """Assert float32 error bounds for inputs of this size."""
    for have, want in zip(*map(jax.tree.leaves, (actual[0], expected[0])), strict=True):
        finite = np.where(np.isneginf(want), 0, want)
        assert_within(have, want, 5e-6 * (1 + np.abs(finite) + size), "value")
    for have, want in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        largest = max(1.0, np.max(np.abs(want), initial=0))
        assert_within(have, want, 5e-6 * (1 + size) * largest, "cotangent")


CASES = (
    Case(1, key_depth=1, value_depth=1),
    Case(65, batch=2, groups=2, value_depth=40),
    Case(70, batch=2, heads=2, options=("segments",)),
    Case(70, batch=2, heads=2, options=("decay per head",)),
    Case(150, groups=2, heads=2, key_depth=20, value_depth=64),
    Case(70, batch=2, heads=2, options=("segments", "decay per feature")),
)


@slow
@pytest.mark.parametrize(
    ("case", "is_log"),
    [*((case, True) for case in CASES), *((case, False) for case in CASES[-2:])],
    ids=str,
)
@each_seed
@pytest.mark.usefixtures("a_gpu")
def test_outputs_states_and_gradients(case, is_log, seed):
    arrays = draw(case, seed)
    actual = by(KERNELS, *arrays, is_log=is_log)
    assert_exact(actual, oracle(*arrays, is_log=is_log), 1)


SPLIT_CASES = (
    Case(200, batch=2),
    Case(200, groups=2, heads=2, key_depth=20, options=("decay per head",)),
    Case(200, batch=2, options=("segments", "decay per feature")),
)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one chunk or more."""
    monkeypatch.setattr(parts, "LEAST_CHUNKS", 1)


@pytest.mark.parametrize("is_log", [True, False])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
@each_seed
@pytest.mark.usefixtures("short_parts")
def test_states_before_parts(case, is_log, seed):
    """They are the states after the tokens before, and so are their gradients."""
    inputs, state = draw(replace(case, length=192), seed)
    assert parts.number_of_parts(inputs) == 3

    def before_parts(inputs: Inputs, state: Averages) -> Tree:
        if is_log:
            state = state._replace(mean=jnp.exp(state.mean))
        before = parts.in_parts(inputs, state, 3, is_log=is_log)[1]
        mean = jnp.log(before.mean) if is_log else before.mean
        return before._replace(mean=mean)

    def one_after_the_other(inputs: Inputs, state: Averages) -> Tree:
        states = [state]
        for part in range(2):
            tokens = jax.tree.map(lambda x, part=part: x[:, 64 * part :][:, :64], inputs)
            states.append(Scan().causal(tokens, states[-1], is_log=is_log)[2])
        return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *states)

    actual, expected = (
        differentiate(function, inputs, state, seed)
        for function in (before_parts, one_after_the_other)
    )
    assert_exact(actual, expected, 1)


@slow
@pytest.mark.parametrize("is_log", [True, False])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
@each_seed
@pytest.mark.usefixtures("a_gpu", "short_parts")
def test_sequences_are_split(case, is_log, seed):
    arrays = draw(case, seed)
    assert_exact(by(KERNELS, *arrays, is_log=is_log), oracle(*arrays, is_log=is_log), 1)


def extremes(name: str, seed: int, length: int) -> tuple[Inputs, Averages]:
    std = 1e30 if name == "std 1e30" else 1.0
    inputs, state = draw(Case(length), seed, std)
    tokens = np.arange(length, dtype=np.float32)[:, None, None]
    match name:
        case "keys rise by 10 per token":
            inputs = replace(inputs, key=inputs.key + 10 * tokens)
        case "decay of 3 per token":
            inputs = replace(inputs, log_decay=np.full_like(inputs.key, -3))
        case "one value feature is log 0":
            inputs.value[..., 1] = state.mean[..., 1] = -np.inf
        case "averages of the state of log-size 100":
            state.mean[...] += 100
        case "one average of the state of log-size -200":
            inputs.key[..., 3] = -300
            state.mean[..., 3, 1] = -200
    return inputs, state


EXTREMES = (
    "std 1e30",
    "keys rise by 10 per token",
    "decay of 3 per token",
    "one value feature is log 0",
    "averages of the state of log-size 100",
    "one average of the state of log-size -200",
)


@slow
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("length", [70, 200], ids=["whole", "in parts"])
@each_seed
@pytest.mark.usefixtures("a_gpu", "short_parts")
def test_sums_out_of_range_are_computed_by_chunked(name, length, seed):
    arrays = extremes(name, seed, length)
    assert np.isnan(by(KERNELS, *arrays, is_log=True)[0][0]).all()
    size = max(
        float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) for x in jax.tree.leaves(arrays)
    )
    assert_exact(by(Fused(), *arrays, is_log=True), oracle(*arrays, is_log=True), size)


@slow
@pytest.mark.parametrize("size", [1e-30, 1e30])
@each_seed
@pytest.mark.usefixtures("a_gpu")
def test_values_of_any_size(size, seed):
    inputs, state = draw(Case(70), seed)
    unit = np.float32(size)
    scaled = replace(inputs, value=unit * inputs.value), state._replace(mean=unit * state.mean)
    (y, *_), cotangents = by(Fused(), *scaled, is_log=False)
    (want, *_), _ = oracle(inputs, state, is_log=False)
    assert_within(y / unit, want, 1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(cotangents))


@slow
@each_seed
@pytest.mark.usefixtures("a_gpu")
def test_bfloat16_is_as_exact_as_its_products(seed):
    inputs, state = draw(Case(130), seed)
    reduced = (jnp.asarray(x, jnp.bfloat16) for x in (inputs.query, inputs.key, inputs.value))
    rounded = Inputs(*reduced)
    actual = by(KERNELS, rounded, state, is_log=True)
    assert actual[0][0].dtype == jnp.bfloat16
    expected = oracle(jax.tree.map(np.asarray, rounded), state, is_log=True)
    for have, want in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert np.linalg.norm(have.astype(np.float64) - want) < 2**-6 * np.linalg.norm(want)


@slow
@each_function
@each_seed
@pytest.mark.usefixtures("a_gpu")
def test_token_by_token_equals_one_pass(function, seed):
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 2, 3, 2, 32))
    decay = -jnp.abs(key[..., 0])
    whole, end = function(query, key, value, log_decay=decay, return_state=True)
    state, outputs = None, []
    for t in range(3):
        tokens = (x[:, t : t + 1] for x in (query, key, value))
        y, state = function(
            *tokens,
            log_decay=decay[:, t : t + 1],
            initial_state=state,
            return_state=True,
            implementation="gpu",
        )
        outputs.append(y)
    assert_within(jnp.concatenate(outputs, 1), whole, 1e-5)
    for have, want in zip(*map(jax.tree.leaves, (state, end)), strict=True):
        assert_within(have, want, 1e-5)


@slow
@each_function
@each_seed
@pytest.mark.usefixtures("a_gpu")
def test_windows(function, seed):
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 2, 70, 2, 32))
    y, want = (
        function(query, key, value, local_window_size=20, implementation=implementation)
        for implementation in ("gpu", "reference")
    )
    assert_within(y, want, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "depth", "options"),
    [
        ("bfloat16", 32, ()),
        pytest.param("bfloat16", 128, ("decay per head", "segments"), marks=slow),
        pytest.param("float32", 64, ("decay per feature", "segments"), marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [log_attention, pytest.param(heinsen_attention, marks=slow)])
def test_kernels_can_be_lowered(function, dtype, depth, options, monkeypatch):
    monkeypatch.setattr(mosaic, "is_available", lambda: True)
    x = jnp.zeros((2, 128, 2, depth), dtype)
    keywords: dict[str, Any] = {}
    if options:
        decay = jnp.zeros(x.shape if "decay per feature" in options else x.shape[:-1])
        keywords = {"log_decay": decay, "segment_ids": jnp.zeros(x.shape[:2], jnp.int32)}

    def loss(x):
        y = function(x, x, x, implementation="gpu", **keywords)
        return jnp.sum(y.astype(jnp.float32))

    assert kernels_in(jax.grad(loss), x) == 3  # forward, and two gradients


def test_without_a_gpu_it_is_refused():
    if mosaic.is_available():
        pytest.skip("a GPU is available")
    x = jnp.zeros((5, 1, 32))
    with pytest.raises(NotImplementedError, match=r"Hopper.*chunked"):
        log_attention(x, x, x, implementation="gpu")


@pytest.mark.parametrize(
    ("depth", "dtype", "keywords", "reason"),
    [
        (129, "bfloat16", {}, "exceed 128"),
        (128, "float32", {}, "use bfloat16"),
        (32, "complex64", {}, "complex"),
        (32, "float32", {"is_causal": False}, "is_causal"),
    ],
)
def test_calls_without_a_kernel_are_refused(depth, dtype, keywords, reason):
    x = jnp.zeros((5, 1, depth), jnp.finfo(dtype).dtype)
    with pytest.raises(NotImplementedError, match=f'implementation="gpu".*{reason}'):
        log_attention(x, x, x.astype(dtype), implementation="gpu", **keywords)


def test_versions_of_jax_without_the_kernel_language_are_refused(monkeypatch):
    def import_module(name: str) -> None:
        raise ImportError("no Layout in pallas")

    monkeypatch.setattr(mosaic, "is_available", lambda: True)
    monkeypatch.setattr(importlib, "import_module", import_module)
    x = jnp.zeros((5, 1, 32))
    with pytest.raises(NotImplementedError, match=f"{jax.__version__}.*no Layout.*chunked"):
        log_attention(x, x, x, implementation="gpu")
