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
# # 1. The mechanism by hand
#
# Softmax attention compares every token with every other token. [Heinsen
# (2024)](https://arxiv.org/abs/2404.05843) changes one thing, the score of a query and a key. All
# that attention needs from the past then becomes a sum, which can be carried from token to token:
# the millionth token costs as much as the first.
#
# This notebook derives it step by step, with ten tokens and a few lines of NumPy, and ends with an
# unlimited stream.

# %%
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from heinsen_jax.attention import LogAttentionState, log_attention

rng = np.random.default_rng(0)
tokens, key_depth, value_depth = 10, 4, 3
query = rng.standard_normal((tokens, key_depth))
key = rng.standard_normal((tokens, key_depth))
value = np.exp(rng.standard_normal((tokens, value_depth)))  # positive, for now

# %% [markdown]
# ## The score
#
# The score of a query $q$ and a key $k$ is $\log \sum_i e^{q_i} e^{k_i}$, the logarithm of the dot
# product of their exponentials. Attention is the softmax of scores, as usual (eq. 1):
#
# $$Y = \mathrm{Softmax}\left(\log \exp(Q) \exp(K)^T\right) V$$
#
# A causal token attends to itself and to earlier tokens.


# %%
def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


scores = np.log(np.exp(query) @ np.exp(key).T)
is_past = np.tril(np.ones((tokens, tokens), bool))
weights = softmax(np.where(is_past, scores, -np.inf))
quadratic = weights @ value

plt.figure(figsize=(4, 3.4))
plt.imshow(weights, cmap="magma")
plt.xlabel("key position")
plt.ylabel("query position")
plt.title("attention weights: each row sums to 1")
plt.colorbar()
plt.show()

# %% [markdown]
# This is a $T \times T$ matrix: a sequence of twice the length needs four times the work. So far
# nothing is gained.
#
# ## The logarithm cancels the exponential
#
# $\mathrm{softmax}(\log x) = x / \sum x$. The exponential in the softmax cancels the logarithm in
# the score. A matrix product remains, which is associative:
#
# $$Y = \frac{\left(e^{Q} e^{K^T}\right) V}{\left(e^{Q} e^{K^T}\right) 1}
#     = \frac{e^{Q} \left(e^{K^T} V\right)}{e^{Q} \left(e^{K^T} 1\right)}
#     = \frac{e^{Q} S}{e^{Q} Z}$$
#
# $S$ has `key_depth x value_depth` elements and $Z$ has `key_depth`, for any number of tokens. For
# causal attention they are running sums over the tokens.

# %%
S = np.cumsum(np.exp(key)[:, :, None] * value[:, None, :], axis=0)
Z = np.cumsum(np.exp(key), axis=0)
print("S after each token:", S.shape, "  Z after each token:", Z.shape)

numerator = np.einsum("tk,tkv->tv", np.exp(query), S)
denominator = np.einsum("tk,tk->t", np.exp(query), Z)
linear = numerator / denominator[:, None]
print("largest difference from the quadratic form:", np.abs(linear - quadratic).max())

# %% [markdown]
# The results are the same, without a matrix of tokens by tokens.
#
# ## In log space
#
# Exponentials overflow: the largest float32 is $e^{88}$. Therefore everything is represented by its
# logarithm, and sums become log-sums of exponentials, which do not overflow (eqs. 2 to 6):
#
# $$\log Y = \mathrm{LSE}_k(Q + H_S) - \mathrm{LSE}_k(Q + H_Z), \qquad
#   H_S = \mathrm{LSE}_s(K_s + \log V_s), \quad H_Z = \mathrm{LSE}_s(K_s)$$
#
# Values are given as logarithms, and outputs are logarithms as well.


# %%
def log_sum_exp(x, axis):
    largest = x.max(axis, keepdims=True)
    return np.log(np.exp(x - largest).sum(axis)) + np.squeeze(largest, axis)


log_value = np.log(value)
H_S = np.logaddexp.accumulate(key[:, :, None] + log_value[:, None, :], axis=0)
H_Z = np.logaddexp.accumulate(key, axis=0)
in_logs = log_sum_exp(query[:, :, None] + H_S, 1) - log_sum_exp(query + H_Z, 1)[:, None]
print("largest difference:", np.abs(np.exp(in_logs) - quadratic).max())

# %% [markdown]
# This is the whole mechanism. `log_attention` computes this formula by matrix products over chunks,
# exactly for any finite input. Its arguments are `[..., tokens, heads, depth]`, as in
# `jax.nn.dot_product_attention`; here with one head.


# %%
def one_head(x):
    return jnp.asarray(x, jnp.float32)[:, None]


log_y = log_attention(one_head(query), one_head(key), one_head(log_value))
print("largest difference:", np.abs(np.exp(log_y[:, 0]) - quadratic).max())

# %% [markdown]
# ## An unlimited stream
#
# The state is $(H_S, H_Z)$. Initially it is the state of no tokens, $\log 0 = -\infty$. Here a
# generator yields an unlimited number of tokens, one at a time. The state has the same size after
# token 5000 as after token 1.


# %%
def unlimited(seed):
    rng, sizes = np.random.default_rng(seed), (key_depth, key_depth, value_depth)
    while True:
        yield tuple(rng.standard_normal((1, 1, size), np.float32) for size in sizes)


@jax.jit
def read_and_add(state, query, key, log_value):
    return log_attention(query, key, log_value, initial_state=state, return_state=True)


state = LogAttentionState.empty((), num_kv_heads=1, key_depth=key_depth, value_depth=value_depth)
inputs, outputs, sizes = [], [], []
for token in itertools.islice(unlimited(seed=1), 5000):
    log_y, state = read_and_add(state, *token)
    inputs.append(token)
    outputs.append(log_y)
    sizes.append(sum(x.size for x in jax.tree.leaves(state)))
print("elements of the state after tokens 1, 100, 5000:", sizes[0], sizes[99], sizes[4999])

everything = [np.concatenate(parts) for parts in zip(*inputs, strict=True)]
single_call = log_attention(*everything)
difference = np.abs(np.concatenate(outputs) - single_call).max()
print("largest difference of the stream from a single call:", difference)

# %% [markdown]
# ## States are additive
#
# The state of two consecutive sequences is the sum of their states (of their exponentials, in log
# space). A sequence can therefore be split into chunks that are processed independently, even on
# different machines, and merged in a tree.

# %%
_, keys, log_values = everything
empty = LogAttentionState.empty((), num_kv_heads=1, key_depth=key_depth, value_depth=value_depth)
first = empty.absorb(keys[:2000], log_values[:2000])
rest = empty.absorb(keys[2000:], log_values[2000:])
merged = first.merge(rest)
print("merged and streamed H_S differ by", jnp.abs(merged.log_s - state.log_s).max())

# %% [markdown]
# ## The price
#
# A softmax over $q \cdot k$ can put nearly all weight on one token among thousands. Here weights
# are $\sum_i e^{q_i + k_i}$, a sum of `key_depth` products: a key stands out only by a large
# feature, which then affects all queries with a large value of this feature. Notebook 5 measures
# how much this matters; notebook 2 shows what is gained.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
strong = 3 * rng.standard_normal((2, 60, key_depth))
dot = softmax(np.where(np.tril(np.ones((60, 60), bool)), strong[0] @ strong[1].T, -np.inf))
log = softmax(
    np.where(
        np.tril(np.ones((60, 60), bool)), np.log(np.exp(strong[0]) @ np.exp(strong[1]).T), -np.inf
    )
)
for panel, weights, name in zip(
    axes, (dot, log), ("softmax attention", "log-attention"), strict=True
):
    image = panel.imshow(weights, cmap="magma", vmin=0, vmax=1)
    count = np.count_nonzero(weights.max(1) > 0.5)
    panel.set(title=f"{name}: {count} of 60 rows above 1/2", xlabel="key", ylabel="query")
figure.colorbar(image, ax=axes, label="weight")
plt.show()
