"""The fused kernels: on a GPU where there is one, else interpreted, and lowered everywhere."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from heinsen_jax.ops import heinsen_attention, log_attention
from heinsen_jax.ops.log_attention import gpu
from heinsen_jax.ops.log_attention.gpu import Fused
from heinsen_jax.ops.log_attention.scan import Scan
from tests.ops.log_attention import cases, families, keywords_test
from tests.ops.log_attention.cases import Case, Inputs

FAMILIES = families.FINITE | families.MASKED
# Interpreted products warn where a GPU says inf or NaN, for which kernels are tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
FUSED = Fused(otherwise=Scan())  # which compiles sooner than `Chunked`


@dataclass(frozen=True)
class Nowhere:
    """An implementation that has no results."""

    def causal(self, tokens, state):
        y, log_z, after = Scan().causal(tokens, state)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (y, log_z, after))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That kernels are for, or one that JAX imitates."""
    if gpu.is_available():
        yield
        return
    pallas: Any = mosaic_gpu  # of which JAX 0.10 has less
    if not hasattr(pallas, "InterpretGPUParams"):
        pytest.skip("kernels are interpreted by JAX 0.11 or newer, and there is no GPU")
    monkeypatch.setattr(gpu, "is_available", lambda: True)
    with pallas.force_gpu_interpret_mode(pallas.InterpretGPUParams()):
        yield


@pytest.mark.parametrize(
    "case",
    [
        Case(1, key_depth=1, value_depth=1, has_state=True),
        Case(65, batch=(2,), num_heads=2, num_kv_heads=2, key_depth=32, value_depth=40),
        Case(150, num_heads=4, num_kv_heads=2, key_depth=20, value_depth=64, has_state=True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("a_gpu")
def test_values_states_and_gradients(case):
    inputs = cases.random_inputs(case, seed=int(np.random.default_rng().integers(2**32)))
    cases.assert_as_exact(cases.differentiate(inputs, FUSED), cases.oracle(inputs), std=1)


@pytest.mark.parametrize(
    "names",
    [
        ("segment_ids",),
        ("decay per head",),
        ("segment_ids", "padding on both sides", "decay per feature"),
    ],
)
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.usefixtures("a_gpu")
def test_keywords(names, function):
    seed = int(np.random.default_rng().integers(2**32))
    arrays = keywords_test.draw_arrays(seed)
    keywords = keywords_test.draw_keywords(names, seed)
    keywords_test.assert_agrees(
        arrays, keywords, 1, function=function, implementation=FUSED, is_causal=True
    )


@pytest.mark.parametrize(
    ("names", "otherwise"),
    [((), Nowhere()), (("segment_ids",), Nowhere()), (("decay per feature",), Scan())],
    ids=str,
)
@pytest.mark.usefixtures("a_gpu")
def test_spans_side_by_side(names, otherwise):
    """Of which the last is padding alone."""
    seed = int(np.random.default_rng().integers(2**32))
    keywords_test.assert_agrees(
        keywords_test.draw_arrays(seed),
        keywords_test.draw_keywords(names, seed),
        1,
        function=log_attention,
        implementation=Fused(otherwise, spans=3),
        is_causal=True,
    )


@pytest.mark.parametrize(("key_depth", "value_depth"), [(32, 32), (64, 128), (128, 64), (9, 5)])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.usefixtures("a_gpu")
def test_one_token(has_state, key_depth, value_depth):
    """By its own kernel, of any size of inputs; of other depths as the definition has it."""
    seed = int(np.random.default_rng().integers(2**32))
    for std in (1, 1000):
        shapes = {"key_depth": key_depth, "value_depth": value_depth, "has_state": has_state}
        case = Case(1, batch=(3,), num_heads=2, **shapes)
        inputs, fused = cases.random_inputs(case, seed, std), Fused(otherwise=Nowhere())
        cases.assert_as_exact(cases.differentiate(inputs, fused), cases.oracle(inputs), std=std)
        if has_state and std > 1:
            continue  # values of e^1000
        (y, gradients), want = cases.differentiate_mean(inputs, fused), cases.mean_oracle(inputs)
        cases.assert_within(y, want[0], 5e-6 * std * (1 + std))
        cases.assert_gradients_within(gradients, want[1], 5e-6 * std * (1 + std))


@pytest.mark.parametrize("names", [("segment_ids",), ("decay per head",), ("decay per feature",)])
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.usefixtures("a_gpu")
def test_token_by_token_is_one_pass(names, function):
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = jax.random.normal(keys[0], (3, 2, 7, 2, 32))
    options: Any = {}
    if "segment_ids" in names:
        options["segment_ids"] = jnp.array([[0, 0, 1, 1, 1, 2, 2], [0] * 7])
    else:
        rates = (2, 7, 2, 32) if names == ("decay per feature",) else (2, 7, 2)
        options["log_decay"] = -jax.random.exponential(keys[1], rates)
    whole, end = function(query, key, value, return_state=True, **options)
    state, one_by_one = None, []
    for t in range(7):
        here = {name: x[:, t : t + 1] for name, x in options.items()}
        if "segment_ids" in names:  # a state belongs to the document that goes on
            begins = options["segment_ids"][:, t] != options["segment_ids"][:, max(t - 1, 0)]
            forget = jnp.where(begins, -jnp.inf, 0.0)[:, None, None]
            here = {"log_decay": jnp.broadcast_to(forget, (2, 1, 2))}
        tokens = (x[:, t : t + 1] for x in (query, key, value))
        options_ = {"initial_state": state, "return_state": True, "implementation": FUSED}
        y, state = function(*tokens, **options_, **here)
        one_by_one.append(y)
    cases.assert_within(jnp.concatenate(one_by_one, 1), whole, 1e-5)
    cases.assert_within(state.log_z, end.log_z, 1e-5)


@pytest.mark.usefixtures("a_gpu")
def test_ordinary_inputs_need_kernels_alone():
    inputs = cases.random_inputs(Case(130, key_depth=32, value_depth=32), seed=0)
    result = cases.differentiate(inputs, Fused(otherwise=Nowhere()))
    cases.assert_as_exact(result, cases.oracle(inputs), std=1)


@pytest.mark.parametrize("name", ["std 1e30", "key +10 per token", "one value feature"])
@pytest.mark.usefixtures("a_gpu")
def test_what_kernels_cannot_do_is_done_otherwise(name):
    inputs = FAMILIES[name]()
    nothing = cases.differentiate(inputs, Fused(otherwise=Nowhere()))
    assert np.isnan(nothing.output).all()
    size = families.size_of(inputs)
    actual, expected = cases.differentiate(inputs, FUSED), cases.oracle(inputs)
    cases.assert_as_exact(actual, expected, size)


@pytest.mark.parametrize("name", ["1e30", "zeros", "1e-30, then 1", "keys rise by 50 in a chunk"])
@pytest.mark.usefixtures("a_gpu")
def test_values_of_any_sign_and_size(name):
    inputs = families.VALUES[name]()._replace(state=None)
    output, gradients = cases.differentiate_mean(inputs, FUSED)
    expected, expected_gradients = cases.mean_oracle(inputs)
    size = families.largest(inputs.query, inputs.key)
    unit = np.max(np.abs(inputs.value))
    cases.assert_within(output / unit, expected / unit, 5e-6 * (1 + size))

    def in_units(gradients: Inputs) -> Inputs:
        return gradients._replace(query=gradients.query / unit, key=gradients.key / unit)

    cases.assert_gradients_within(
        in_units(gradients), in_units(expected_gradients), 5e-6 * (1 + size)
    )


@pytest.mark.usefixtures("a_gpu")
def test_bfloat16_is_as_exact_as_its_products():
    inputs = cases.random_inputs(Case(130, key_depth=32, value_depth=32), seed=1)
    rounded = Inputs(*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]))
    result = cases.differentiate(rounded, FUSED)
    expected = cases.oracle(Inputs(*(np.asarray(x, np.float64) for x in rounded[:3])))
    assert result.output.dtype == jnp.bfloat16
    for have, want in zip(
        jax.tree.leaves((result.output, result.gradients)),
        jax.tree.leaves((expected.output, expected.gradients)),
        strict=True,
    ):
        difference = np.linalg.norm(have.astype(np.float64) - want)
        assert difference < 2**-6 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("dtype", "depth", "options"),
    [
        ("bfloat16", 32, ()),
        ("bfloat16", 128, ("decay", "segments")),
        ("float32", 64, ("decay of each feature", "segments")),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_kernels_can_be_lowered(function, dtype, depth, options, monkeypatch):
    monkeypatch.setattr(gpu, "is_available", lambda: True)
    batch, length, heads = 2, 128, 2
    x = jnp.zeros((batch, length, heads, depth), dtype)
    keywords: dict[str, Any] = {}
    if options:
        decay = jnp.zeros(x.shape if "decay of each feature" in options else x.shape[:-1])
        keywords = {"log_decay": decay, "segment_ids": jnp.zeros((batch, length), jnp.int32)}

    def loss(x):
        y = partial(function, implementation="gpu")(x, x, x, **keywords)
        return jnp.sum(y.astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 3  # forward, and two gradients


def test_kernels_of_spans_can_be_lowered(monkeypatch):
    monkeypatch.setattr(gpu, "is_available", lambda: True)
    x = jnp.zeros((1, 256, 2, 64), "bfloat16")
    keywords = {"log_decay": jnp.zeros((1, 256, 2)), "segment_ids": jnp.zeros((1, 256), jnp.int32)}

    def loss(x):
        y = log_attention(x, x, x, implementation=Fused(spans=2), **keywords)
        return jnp.sum(y.astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 5  # and of states: two more


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.parametrize("depth", [32, 64, 128])
def test_one_token_lowers_to_one_kernel(depth, function, monkeypatch):
    monkeypatch.setattr(gpu, "is_available", lambda: True)
    x = jnp.zeros((2, 1, 4, depth))
    options: Any = {"implementation": "gpu", "return_state": True}
    options |= {"log_decay": jnp.zeros((2, 1, 4))}
    lowered = jax.jit(lambda x: function(x, x, x, **options)).trace(x)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


def test_without_a_gpu_it_is_refused():
    if gpu.is_available():
        pytest.skip("there is a GPU")
    x = jnp.zeros((5, 1, 32))
    with pytest.raises(NotImplementedError, match=r"Hopper.*chunked"):
        log_attention(x, x, x, implementation="gpu")


@pytest.mark.parametrize(
    ("depth", "dtype", "keywords", "reason"),
    [
        (129, "bfloat16", {}, "more than 128"),
        (128, "float32", {}, "use bfloat16"),
        (32, "complex64", {}, "complex"),
        (32, "float32", {"is_causal": False}, "is_causal"),
    ],
)
def test_what_kernels_are_not_for_is_refused(depth, dtype, keywords, reason):
    x = jnp.zeros((5, 1, depth), jnp.finfo(dtype).dtype)
    value = x.astype(dtype)
    for implementation in ("gpu", FUSED):
        with pytest.raises(NotImplementedError, match=f'implementation="gpu".*{reason}'):
            log_attention(x, x, value, implementation=implementation, **keywords)


def test_without_what_kernels_are_written_with_it_is_refused(monkeypatch):
    def import_module(name: str) -> None:
        raise ImportError("no Layout in pallas")

    monkeypatch.setattr(gpu, "is_available", lambda: True)
    monkeypatch.setattr(importlib, "import_module", import_module)
    x = jnp.zeros((5, 1, 32))
    with pytest.raises(NotImplementedError, match=f"{jax.__version__}.*no Layout.*chunked"):
        log_attention(x, x, x, implementation="gpu")
