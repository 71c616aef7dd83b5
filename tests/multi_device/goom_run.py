"""Program with 2 virtual devices: products and chains of matrices that are split over them.

Argument: the kind of the axis, explicit or auto. Prints the largest difference from one device's
values and gradients, and the sharding of the products.
"""

import json
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from heinsen_jax.goom import chain_products, from_goom, matmul, norm, to_goom  # noqa: E402


def products(x: jax.Array) -> jax.Array:
    return from_goom(matmul(to_goom(x), to_goom(x)))


def loss(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(products(x))) + jnp.sum(norm(to_goom(x)).log_abs)


kind = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[sys.argv[1]]
mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
x = np.random.default_rng(0).standard_normal((4, 3, 3)).astype(np.float32)


def chains(x: jax.Array) -> jax.Array:
    """20 factors for each matrix."""
    factors = jnp.stack([jnp.roll(x, i, -1) for i in range(20)], 1)
    return jax.vmap(lambda matrices: chain_products(matrices).log_abs)(factors)


one = jax.jit(products)(x), jax.jit(jax.grad(loss))(x), jax.jit(chains)(x)
with jax.set_mesh(mesh):
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    two = jax.jit(products)(split), jax.jit(jax.grad(loss))(split), jax.jit(chains)(split)
error = max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in zip(one, two, strict=True))
print(json.dumps({"error": error, "spec": str(two[0].sharding.spec)}))
