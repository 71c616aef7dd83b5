"""Every mechanism under every transform of JAX and Flax."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from flax.errors import TraceContextError
from flax.traverse_util import flatten_dict
from jax import lax

from heinsen_jax import attention
from heinsen_jax.attention import Attention, mechanism, names
from tests.attention.small import MODEL_DIM, NUM_HEADS, random_layer
from tests.compilations import compiles_again

LENGTH, ROWS = 24, 3
SHORT = "linear", "softmax"
SHORT_PAIRS = {("log", "gradient outside jit")}
REVERSE_ONLY = {"additive", "l1", "l1_sparse", "log", "log_window", "performer"}
"""Mechanisms with a custom backward pass."""
NOT_QUANTIZED = {"colt5", "log_window", "mla", "rmt"}
"""Mechanisms that use weights outside of Flax's layers, which qwix refuses."""
COMPILED_AGAIN = {"rmt"}
"""Mechanisms with a loop over a function that they are given."""


@cache
def layer_of(name: str) -> Attention:
    return random_layer(name, **mechanism(name).short_options(LENGTH))


@cache
def inputs() -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((ROWS, LENGTH, MODEL_DIM))
    return x.astype(np.float32)


@cache
def expected(name: str) -> np.ndarray:
    return np.asarray(jax.jit(layer_of(name))(inputs()))


def assert_close(name: str, y: Any, tolerance: float = 2e-5) -> None:
    atol = tolerance * np.abs(expected(name)).max()
    np.testing.assert_allclose(np.asarray(y, np.float32), expected(name), atol=atol, rtol=0)


def vmap(name: str) -> None:
    assert_close(name, jax.jit(jax.vmap(layer_of(name)))(inputs()))


def vmap_with_shared_tokens(name: str) -> None:
    layer = layer_of(name)
    if not layer.capabilities.cross:
        pytest.skip("without cross-attention")
    source = inputs()[0]
    shared = jax.jit(jax.vmap(lambda x, s: layer(x, source=s), in_axes=(0, None)))
    repeated = np.broadcast_to(source, inputs().shape)
    y = layer(inputs(), source=repeated)
    np.testing.assert_allclose(shared(inputs(), source), y, atol=2e-5 * np.abs(y).max())


def scan(name: str) -> None:
    """A scan over the parameters of two layers applies one after the other."""
    graph, parameters = nnx.split(layer_of(name))
    stack = jax.tree.map(lambda x: jnp.stack([x, x / 2]), parameters)
    step = lambda x, p: (nnx.merge(graph, p)(x), None)  # noqa: E731
    y, _ = jax.jit(partial(lax.scan, step))(inputs(), stack)
    half = nnx.merge(graph, jax.tree.map(lambda x: x / 2, parameters))
    then = jax.jit(half)(jnp.asarray(expected(name)))
    np.testing.assert_allclose(y, then, atol=1e-4 * np.abs(then).max())


def gradient(name: str, apply: Callable) -> Any:
    graph, parameters = nnx.split(layer_of(name))

    def loss(parameters: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(apply(nnx.merge(graph, parameters), x)))

    return jax.jit(jax.grad(loss, (0, 1)))(parameters, inputs())


def remat(name: str) -> None:
    plain = gradient(name, lambda layer, x: layer(x))
    recomputed = gradient(name, lambda layer, x: jax.checkpoint(layer)(x))
    for a, b in zip(jax.tree.leaves(recomputed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def jvp(name: str) -> None:
    """Forward mode agrees with reverse mode, or is refused by JAX."""
    layer, x = layer_of(name), jnp.asarray(inputs())
    tangent = jnp.cos(x)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x)))

    if name in REVERSE_ONLY:
        with pytest.raises(TypeError, match="forward-mode autodiff"):
            jax.jvp(total, (x,), (tangent,))
        return
    _, forward = jax.jit(partial(jax.jvp, total))((x,), (tangent,))
    reverse = jnp.vdot(gradient(name, lambda layer, x: layer(x))[1], tangent)
    np.testing.assert_allclose(forward, reverse, rtol=1e-3, atol=1e-4)


def gradient_outside_jit(name: str) -> None:
    """Equal calls are compiled once, backward passes included."""
    layer, x = layer_of(name), jnp.asarray(inputs())
    again = compiles_again(lambda: nnx.grad(lambda layer: jnp.sum(layer(x)))(layer))
    assert again == (name in COMPILED_AGAIN)


def donate(name: str) -> None:
    """A step that is given its state's memory."""
    layer = layer_of(name)
    if not layer.capabilities.streaming:
        pytest.skip("without a state")
    graph, parameters = nnx.split(layer)

    @partial(jax.jit, donate_argnums=2)
    def step(parameters: nnx.State, x: jax.Array, state: Any) -> Any:
        return nnx.merge(graph, parameters)(x, state=state, return_state=True)

    state = jax.tree.map(jnp.copy, layer.init_state((ROWS,), capacity=LENGTH))
    parts = []
    for x in np.split(inputs(), 3, 1):
        y, state = step(parameters, x, state)
        parts.append(y)
    assert_close(name, np.concatenate(parts, 1))


def disable_jit(name: str) -> None:
    """Each operation alone, as when debugging."""
    with jax.disable_jit():
        assert_close(name, layer_of(name)(inputs()))
        layer = layer_of(name)
        if layer.capabilities.streaming:
            state = layer.init_state((ROWS,), capacity=LENGTH)
            y, _ = layer(inputs()[:, :1], state=state, return_state=True)
            atol = 2e-5 * np.abs(expected(name)).max()
            np.testing.assert_allclose(y, expected(name)[:, :1], atol=atol, rtol=0)


def nnx_jit(name: str) -> None:
    assert_close(name, nnx.jit(lambda layer, x: layer(x))(layer_of(name), inputs()))


def plain_jit(name: str) -> None:
    """The module is an argument: a pytree."""
    assert_close(name, jax.jit(lambda layer, x: layer(x))(layer_of(name), inputs()))


def linen(name: str) -> None:
    """The bridge's parameters, in a module of NNX, give the same results."""
    options = mechanism(name).short_options(LENGTH)
    build = partial(attention.build, name, model_dim=MODEL_DIM, num_heads=NUM_HEADS, **options)
    module = nnx.bridge.ToLinen(lambda *, rngs: build(rngs=rngs))
    variables = module.init(jax.random.key(0), inputs())
    by_path = flatten_dict(flax.core.meta.unbox(variables["params"]))
    graph, parameters = nnx.split(build(rngs=nnx.Rngs(0)))
    paths = {tuple(map(str, path)): path for path, _ in nnx.to_flat_state(parameters)}
    assert {tuple(map(str, path)) for path in by_path} == set(paths)
    flat = dict(nnx.to_flat_state(parameters))
    for path, value in by_path.items():
        flat[paths[tuple(map(str, path))]][...] = value
    y = jax.jit(nnx.merge(graph, nnx.from_flat_state(flat)))(inputs())
    applied = jax.jit(module.apply)(variables, inputs())
    np.testing.assert_allclose(applied, y, atol=2e-5 * np.abs(y).max())


def int8(name: str) -> None:
    """Weights and activations of matrix products with parameters, by qwix."""
    rule = qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)
    y, x = expected(name), jnp.asarray(inputs())
    layer = nnx.clone(layer_of(name))
    if name in NOT_QUANTIZED:
        with pytest.raises((ValueError, TraceContextError)):
            qwix.quantize_model(layer, qwix.PtqProvider([rule]), x)(x)
        return
    quantized = qwix.quantize_model(layer, qwix.PtqProvider([rule]), x)
    dtypes = {x.dtype for x in jax.tree.leaves(nnx.state(quantized))}
    assert jnp.dtype("int8") in dtypes
    error = np.asarray(quantized(x)) - y
    assert np.sqrt(np.mean(error**2) / np.mean(y**2)) < 0.1


def half(name: str, dtype: str) -> None:
    options = mechanism(name).short_options(LENGTH)
    layer = random_layer(name, dtype=dtype, **options)
    y = jax.jit(layer)(inputs().astype(dtype))
    assert y.dtype == dtype
    assert_close(name, y, 0.08 if name == "mlstm" else 0.05)  # a quotient of small sums


TRANSFORMS = {
    "vmap": vmap,
    "vmap with shared tokens": vmap_with_shared_tokens,
    "scan": scan,
    "remat": remat,
    "jvp": jvp,
    "gradient outside jit": gradient_outside_jit,
    "disable_jit": disable_jit,
    "donate": donate,
    "nnx.jit": nnx_jit,
    "jit": plain_jit,
    "linen": linen,
    "int8": int8,
    "bfloat16": partial(half, dtype="bfloat16"),
    "float16": partial(half, dtype="float16"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in qwix, of Flax
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] * (not is_short))
        for pair in product(names(), TRANSFORMS)
        for is_short in [pair[0] in SHORT or pair in SHORT_PAIRS]
    ],
)
def test_each_mechanism_under_each_transform(name, transform):
    TRANSFORMS[transform](name)
