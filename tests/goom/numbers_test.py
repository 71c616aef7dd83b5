"""Generalized orders of magnitude equal real numbers, in value and gradient, at any magnitude."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from heinsen_jax import goom
from heinsen_jax.goom import Goom, from_goom, to_goom

X = np.array([1.5, -2.0, 0.0, 0.0, 3e-5, -4e10], np.float32)
Y = np.array([-1.5, 0.5, 2.0, 0.0, -3e-5, 1e10], np.float32)


def number(log_abs: float, sign: int = 1) -> Goom:
    return Goom(jnp.float32(log_abs), jnp.int8(sign))


def test_numbers_are_converted_exactly_in_sign_and_closely_in_size():
    x = to_goom(X)
    np.testing.assert_array_equal(x.sign, np.sign(X))
    np.testing.assert_array_equal(x.log_abs[2:4], -np.inf)
    np.testing.assert_allclose(from_goom(x), X, rtol=2e-6)


def test_complex_logarithms_are_converted():
    x = to_goom(X)
    z = goom.to_complex(x)
    np.testing.assert_allclose(np.exp(np.asarray(z, np.complex128)).real, X, rtol=2e-6)
    back = goom.from_complex(z + 4j * np.pi)
    np.testing.assert_array_equal(back.sign, x.sign)
    np.testing.assert_array_equal(back.log_abs, x.log_abs)
    assert goom.from_complex(jnp.array(-3j * jnp.pi)).sign == -1


FUNCTIONS = {
    "add": (goom.add, lambda x, y: x + y),
    "subtract": (lambda x, y: x - y, lambda x, y: x - y),
    "multiply": (goom.multiply, lambda x, y: x * y),
    "dot": (goom.dot, lambda x, y: jnp.sum(x * y)),
    "sum": (lambda x, y: goom.sum(x + y * y, 0), lambda x, y: jnp.sum(x + y * y)),
    "norm": (lambda x, y: goom.norm(x - y), lambda x, y: jnp.linalg.norm(x - y)),
    "matmul": (
        lambda x, y: goom.matmul(x[:, None], y[None]),
        lambda x, y: x[:, None] @ y[None],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_real_numbers(name):
    """Also at 0, and for both signs."""
    ours, real = FUNCTIONS[name]

    def through_logarithms(x, y):
        return from_goom(ours(to_goom(x), to_goom(y)))

    wanted, pullback = jax.vjp(real, X, Y)
    given, our_pullback = jax.vjp(jax.jit(through_logarithms), X, Y)
    scale = np.abs(np.asarray(wanted)) + 1e-3
    np.testing.assert_array_less(np.abs(given - wanted), 1e-4 * scale)
    cotangent = np.linspace(-1, 1, wanted.size, dtype=np.float32).reshape(wanted.shape)
    for one, other in zip(our_pullback(cotangent), pullback(cotangent), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    tangents = (np.ones_like(X), np.arange(6, dtype=np.float32))
    (_, forward), (_, wanted) = (jax.jvp(f, (X, Y), tangents) for f in (through_logarithms, real))
    np.testing.assert_allclose(forward, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strict_promotion(name):
    """Dtypes are converted explicitly, also in gradients."""

    def total(x, y):
        return jnp.sum(from_goom(FUNCTIONS[name][0](to_goom(x), to_goom(y))))

    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(total, (0, 1)), jnp.bfloat16(X), jnp.bfloat16(Y))


CHAINS = {
    "initial": lambda x: goom.chain_products(jnp.ones((5, 3, 3)), initial=x[0], return_all=False),
    "chain_products": lambda x: goom.chain_products(x, return_all=False),
    "lyapunov_exponents": goom.lyapunov_exponents,
    "matmul": lambda x: goom.matmul(x[0], x[1]) + 1,
    "norm": goom.norm,
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_device_has_gradients_of_its_own_numbers(name):
    """Inside the user's `jax.shard_map`."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def total(x):
        numbers = CHAINS[name](x[0])
        return jnp.sum(numbers.log_abs if isinstance(numbers, Goom) else numbers)

    spec = PartitionSpec("data")
    gradient = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct((2, 5, 3, 3), jnp.float32)
    assert jax.eval_shape(gradient, x).shape == x.shape


def test_gradients_of_sums_with_a_constant_keep_the_sharding():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=split)
    with jax.sharding.use_abstract_mesh(mesh):
        gradient = jax.eval_shape(jax.grad(lambda x: jnp.sum((to_goom(x) + 1.5).log_abs)), x)
    assert gradient.sharding.spec == PartitionSpec("data", None)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_vectorized(name):
    ours, _ = FUNCTIONS[name]
    x, y = (to_goom(np.stack([z, -z, 2 * z])) for z in (X, Y))
    together = jax.vmap(ours)(x, y)
    for i in range(3):
        alone = ours(x[i], y[i])
        np.testing.assert_allclose(together.log_abs[i], alone.log_abs, rtol=1e-5)
        np.testing.assert_array_equal(together.sign[i], alone.sign)


def test_sums_beyond_floats_are_exact():
    logs, signs = [1e4, 9999.5, 9990.0, -1e4], [1, -1, 1, -1]
    with localcontext(prec=40):
        terms = [sign * Decimal(log).exp() for log, sign in zip(logs, signs, strict=True)]
        wanted = float(sum(terms).ln())
    x = Goom(jnp.array(logs, jnp.float32), jnp.array(signs, jnp.int8))
    assert float(goom.sum(x, 0).log_abs) == pytest.approx(wanted, abs=2e-3)
    small = goom.add(number(-1e6), number(-1e6))
    assert float(small.log_abs) == pytest.approx(-1e6 + np.log(2), abs=0.07)
    assert goom.add(number(1e6), number(1e6, -1)).sign == 0
    assert float(goom.norm(Goom(jnp.full(4, 1e5), jnp.ones(4, jnp.int8))).log_abs) == pytest.approx(
        1e5 + np.log(2), abs=0.01
    )


def test_an_empty_sum_is_0():
    empty = goom.sum(to_goom(jnp.zeros((0, 3))), 0)
    np.testing.assert_array_equal(empty.log_abs, -np.inf)
    np.testing.assert_array_equal(empty.sign, 0)


def test_gradients_beyond_floats_are_finite():
    """A ratio of two sums that overflow."""

    def ratio(x):
        top = goom.add(Goom(x, jnp.int8(1)), number(2e4))
        return top.log_abs - goom.add(Goom(2 * x, jnp.int8(1)), number(2e4)).log_abs

    slope = jax.grad(ratio)(jnp.float32(1e4))
    assert float(slope) == pytest.approx(0 - 2 * 0.5, abs=1e-3)


def test_gradients_at_0_pass_numbers_beyond_floats():
    def through(x):
        return from_goom(to_goom(x) * number(1e3) * number(-1e3))

    assert np.isfinite(jax.grad(through)(0.0))
    y = jnp.array([100.0, -100.0])
    gradient = jax.grad(lambda x: from_goom(goom.dot(to_goom(x), Goom(y, jnp.ones(2, jnp.int8)))))
    assert np.all(np.isfinite(gradient(jnp.array([0.0, 1.0]))))

    def of_product(x):
        left = Goom(jnp.stack([to_goom(x).log_abs, 200.0]), jnp.stack([to_goom(x).sign, 1]))
        right = Goom(jnp.array([[200.0], [0.0]]), jnp.ones((2, 1), jnp.int8))
        return goom.matmul(left[None], right).log_abs[0, 0]

    assert float(jax.grad(of_product)(0.0)) == pytest.approx(1, rel=1e-4)


def test_operators_take_floats_on_either_side():
    x = to_goom(jnp.array([3.0, -2.0]))
    for result in (x + 1, 1 + x, np.float32(1) + x):
        np.testing.assert_allclose(from_goom(result), [4, -1], rtol=1e-6)
    np.testing.assert_allclose(from_goom(1 - x), [-2, 3], rtol=1e-6)
    np.testing.assert_allclose(from_goom(x - np.ones(2)), [2, -3], rtol=1e-6)
    np.testing.assert_allclose(from_goom(np.array([2.0, 2.0]) * x), [6, -4], rtol=1e-6)


def test_other_dtypes_are_at_least_float32():
    for dtype in ("int32", "bfloat16", "float16"):
        assert to_goom(jnp.ones(2, dtype)).dtype == jnp.float32
    with pytest.raises(TypeError, match=r"numbers: complex64 is not real; from_complex"):
        to_goom(jnp.array([1j]))


def test_large_integers_and_misplaced_numbers():
    assert float((to_goom(1) * 10**30).log_abs) == pytest.approx(30 * np.log(10))
    with pytest.raises(TypeError, match="numbers: a Goom; convert it to floats with from_goom"):
        to_goom(to_goom(1.0))


def test_operators_and_indices():
    assert [float(x.log_abs) for x in to_goom(jnp.ones(3))] == [0, 0, 0]
    x, y = to_goom(X), to_goom(Y)
    np.testing.assert_allclose(from_goom((x + y - y * x)[1:3]), (X + Y - X * Y)[1:3], rtol=1e-5)
    assert (x.shape, x.ndim, x.dtype) == ((6,), 1, np.float32)
