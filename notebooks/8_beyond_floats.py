# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Numbers beyond floats
#
# Log-attention stores logarithms, so that its sums never overflow. Generalized orders of magnitude
# (Heinsen and Kozachkov, 2025, [arXiv:2510.03426](https://arxiv.org/abs/2510.03426)) extend this to
# numbers of any sign, and to products of matrices. This notebook multiplies a chain of matrices
# that floats cannot finish, and measures how fast a chaotic system separates.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from heinsen_jax import goom

# %% [markdown]
# ## A chain of products
#
# Products of 16 x 16 matrices with standard normal elements grow by a factor of about 4 with every
# matrix.

# %%
matrices = jax.random.normal(jax.random.key(0), (5000, 16, 16))


def multiply(state, matrix):
    state = matrix @ state
    return state, jnp.abs(state).max()


_, sizes = jax.lax.scan(multiply, jnp.eye(16), matrices)
print("float32 overflows after", int(jnp.isfinite(sizes).sum()), "products")

# %%
products = goom.chain_products(matrices)
print("shape of all products:", products.shape)
print("logarithm and sign of an element of the last one:", products.log_abs[-1, 0, 0], end=" ")
print(products.sign[-1, 0, 0])

plt.figure(figsize=(6, 3.4))
plt.plot(products.log_abs.max((1, 2)), label="logarithms and signs")
plt.plot(jnp.log(sizes), linewidth=4, label="float32")
plt.xlabel("matrices")
plt.ylabel("log of the largest element")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# Gradients are gradients of the numbers, also through a chain that overflows, and right at 0. The
# logarithm of the largest element of the last product has a gradient of moderate size:


# %%
def log_size(matrices):
    return goom.chain_products(matrices, return_all=False).log_abs.max()


gradient = jax.grad(log_size)(matrices[:500])
print("largest element of the gradient:", jnp.abs(gradient).max())

# %% [markdown]
# ## Lyapunov exponents
#
# Two trajectories of the Lorenz system that are close to each other separate by a factor of
# $e^{0.906}$ in a unit of time. The exponents are rates of growth of the product of the Jacobians
# along a trajectory: 50,000 matrices here, whose product has elements of about $e^{450}$, and
# directions that shrink to $e^{-7000}$.


# %%
def velocity(p):
    x, y, z = p
    return jnp.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def step(p, dt=0.01):
    a = velocity(p)
    b = velocity(p + dt / 2 * a)
    c = velocity(p + dt / 2 * b)
    return p + dt / 6 * (a + 2 * b + 2 * c + velocity(p + dt * c))


_, trajectory = jax.lax.scan(lambda p, _: (step(p), p), jnp.ones(3), None, length=51_000)
jacobians = jax.vmap(jax.jacfwd(step))(trajectory[1000:])
print("spectrum:", goom.lyapunov_exponents(jacobians, dt=0.01), "published: 0.906, 0, -14.572")
print("largest:", goom.largest_lyapunov_exponent(jacobians, dt=0.01))

# %%
plt.figure(figsize=(4.5, 3.4))
plt.plot(trajectory[1000:6000, 0], trajectory[1000:6000, 2], linewidth=0.5)
plt.xlabel("x")
plt.ylabel("z")
plt.show()
