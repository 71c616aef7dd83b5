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
# # 3. Numerical precision
#
# Attention with exponentials of keys is known for NaN, overflow and silently wrong results. This
# notebook shows how simple implementations fail, and how `log_attention` avoids it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from heinsen_jax.attention import LogAttentionState, log_attention

rng = np.random.default_rng(0)
TOKENS, DEPTH = 256, 8


def draw(std, rise=0.0):
    """Return query, key and log_value `[T, 1, DEPTH]`; keys rise by `rise` nats per token."""
    query, key, log_value = std * rng.standard_normal((3, TOKENS, 1, DEPTH))
    return query, key + rise * np.arange(TOKENS)[:, None, None], log_value


def truth(query, key, log_value):
    """Compute the definition token by token, in float64 and log space."""
    H_S = np.logaddexp.accumulate(key[:, 0, :, None] + log_value[:, 0, None, :])
    H_Z = np.logaddexp.accumulate(key[:, 0])
    log_S = np.logaddexp.reduce(query[:, 0, :, None] + H_S, 1)
    return log_S - np.logaddexp.reduce(query[:, 0] + H_Z, 1)[:, None]


def report(name, log_y, expected):
    error = np.abs(np.asarray(log_y, np.float64) - expected)
    bad = np.count_nonzero(~np.isfinite(error))
    worst = (
        "-"
        if bad == error.size
        else f"{np.nanmax(np.where(np.isfinite(error), error, np.nan)):.0e}"
    )
    print(f"{name:28} not finite: {bad:4} of {error.size},  largest error of the others: {worst}")


# %% [markdown]
# ## The simple implementation
#
# $S = \sum e^{K} V$ and $Z = \sum e^{K}$ as running sums, as in notebook 1, in float32.


# %%
def naive(query, key, log_value):
    query, key, log_value = (jnp.asarray(x[:, 0], jnp.float32) for x in (query, key, log_value))
    S = jnp.cumsum(jnp.exp(key)[:, :, None] * jnp.exp(log_value)[:, None, :], 0)
    Z = jnp.cumsum(jnp.exp(key), 0)
    numerator = jnp.einsum("tk,tkv->tv", jnp.exp(query), S)
    return jnp.log(numerator / jnp.einsum("tk,tk->t", jnp.exp(query), Z)[:, None])


def ours(query, key, log_value):
    arrays = (jnp.asarray(x, jnp.float32) for x in (query, key, log_value))
    return log_attention(*arrays)[:, 0]


CASES = {
    "ordinary": {"std": 1.0},
    "large": {"std": 30.0},
    "huge": {"std": 1e4},
    "rising by 1 nat per token": {"std": 1.0, "rise": 1.0},
    "falling by 1 nat per token": {"std": 1.0, "rise": -1.0},
}
for name, options in CASES.items():
    inputs = draw(**options)
    print(name)
    report("  naive", naive(*inputs), truth(*inputs))
    report("  log_attention", ours(*inputs), truth(*inputs))

# %% [markdown]
# Keys of a trained model can become this large, if only for one head and one token. One NaN is then
# in every parameter after the next update.
#
# ## "Subtract the maximum"
#
# is the usual solution, and the right one for a softmax over all tokens. In causal attention,
# however, the maximum may belong to a later token. If keys rise, the largest key of a chunk
# belongs to its last tokens; relative to it, the weights of the first tokens underflow in float32.


# %%
def scaled_by_maximum(query, key, log_value):
    query, key, log_value = (jnp.asarray(x[:, 0], jnp.float32) for x in (query, key, log_value))
    visible = jnp.tril(jnp.ones((TOKENS, TOKENS)))
    weights = visible * (jnp.exp(query) @ jnp.exp(key - key.max(0)).T)  # one scale for all tokens
    return jnp.log((weights @ jnp.exp(log_value)) / weights.sum(1, keepdims=True))


for rise in (0.1, 0.5, 1.0, 4.0):
    inputs = draw(1.0, rise)
    print(f"rising by {rise} nats per token")
    report("  one maximum for all", scaled_by_maximum(*inputs), truth(*inputs))
    report("  log_attention", ours(*inputs), truth(*inputs))

# %% [markdown]
# `log_attention` measures the rise of keys first. If it is small within a chunk, as in nearly all
# models, matrix products with one scale per chunk are exact and fast. Otherwise an exact tier
# computes the scores in log space and one softmax per token. The tier is chosen for each block of
# tokens, on the device.
#
# ## The state of no tokens
#
# The paper starts from a state of zeros (eq. 7). In log space this is $\log 1$, not $\log 0$: an
# additional token that all later tokens attend to.

# %%
query, key, log_value = (jnp.asarray(x, jnp.float32) for x in draw(1.0))
zeros = LogAttentionState(jnp.zeros((1, DEPTH, DEPTH)), jnp.zeros((1, DEPTH)))
empty_state = LogAttentionState.empty((), 1, DEPTH, DEPTH)
expected = truth(*(np.asarray(x, np.float64) for x in (query, key, log_value)))
for name, state in (("zeros", zeros), ("log 0", empty_state)):
    error = np.abs(log_attention(query, key, log_value, initial_state=state)[:, 0] - expected)
    print(
        f"from {name:6}: error after token 1: {error[0].max():.3f}, "
        f"after 256: {error[-1].max():.5f}"
    )

# %% [markdown]
# But $-\infty$ needs care: $-\infty - (-\infty)$ is NaN, and a function with the right value at
# $-\infty$ may have a NaN gradient there. In `log_attention` a token without visible tokens has log
# Y = $-\infty$ and zero gradients.

# %%
seq_lengths = jnp.array([0, 100])  # padding after token 0: no valid token


def of_padding(query):
    arrays = query[None], key[None], log_value[None]
    y = log_attention(*arrays, key_value_seq_lengths=seq_lengths[:1])
    return jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0))


print("gradient without visible tokens:", jnp.abs(jax.grad(of_padding)(query)).max())
naive_gradient = jax.grad(lambda x: jax.nn.logsumexp(x))(jnp.full(3, -jnp.inf))
print("gradient of jax.nn.logsumexp at log 0:", naive_gradient)

# %% [markdown]
# ## Drift of sums
#
# A float32 has 7 digits. A running sum that is rounded at every token drifts; a tree of sums does
# not. This cell compares the state after $T$ tokens with float64:

# %%
lengths = [2**i for i in range(8, 18)]
long_key = rng.standard_normal((lengths[-1], 1, 4))
exact = np.logaddexp.accumulate(long_key[:, 0])
one_by_one = jax.jit(
    lambda x: jax.lax.scan(lambda h, k: (jnp.logaddexp(h, k),) * 2, jnp.full(4, -jnp.inf), x)[1]
)(jnp.asarray(long_key[:, 0], jnp.float32))
drift = [np.abs(one_by_one[n - 1] - exact[n - 1]).max() for n in lengths]


def state_after(n):
    key = jnp.asarray(long_key[:n], jnp.float32)
    return LogAttentionState.empty((), 1, 4, 1).absorb(key, jnp.zeros((n, 1, 1))).log_z[0]


steady = [np.abs(state_after(n) - exact[n - 1]).max() for n in lengths]
plt.figure(figsize=(5, 3.2))
plt.loglog(lengths, drift, "o-", label="sequential sum")
plt.loglog(lengths, steady, "o-", label="heinsen_jax")
plt.xlabel("tokens")
plt.ylabel("error of the state")
plt.legend()
plt.grid(alpha=0.3)

# %% [markdown]
# ## Range of inputs
#
# Errors relative to $1 + |\log Y|$ plus the standard deviation of the inputs, over 33 orders of
# magnitude.

# %%
sizes = [10.0**i for i in range(-3, 31, 3)]
errors = []
for std in sizes:
    inputs = [np.float32(x) for x in draw(std)]
    expected = truth(*(x.astype(np.float64) for x in inputs))
    result = np.asarray(ours(*inputs), np.float64)
    assert np.all(np.isfinite(result))
    errors.append(np.max(np.abs(result - expected) / (1 + np.abs(expected) + std)))
print(f"largest error for inputs from 0.001 to 1e30: {max(errors):.0e}; all outputs are finite")
