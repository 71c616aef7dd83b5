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
# # 2. Constant cost per token
#
# This notebook measures three costs of softmax attention and log-attention: processing a sequence
# of $T$ tokens, the memory of its state or cache, and one further token.

# %%
import time

import jax
import matplotlib.pyplot as plt
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.attention import log_attention
from heinsen_jax.ops import dot_product_attention

HEADS, DEPTH = 4, 32


def seconds(function, *arguments, times=3):
    """Return the minimum time of a few calls, after compilation."""
    jax.block_until_ready(function(*arguments))
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken.append(time.perf_counter() - start)
    return min(taken)


def tokens(length):
    keys = jax.random.split(jax.random.key(length), 3)
    return [jax.random.normal(key, (1, length, HEADS, DEPTH)) for key in keys]


# %% [markdown]
# ## Processing a sequence
#
# Softmax attention compares all pairs of tokens: twice the length needs four times the work.
# Log-attention is linear. Both are compiled by XLA.

# %%
softmax = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
log = jax.jit(lambda q, k, v: log_attention(q, k, v))
lengths = [256, 512, 1024, 2048, 4096]
times = {
    name: [seconds(function, *tokens(length)) for length in lengths]
    for name, function in (("softmax", softmax), ("log", log))
}
for length, a, b in zip(lengths, *times.values(), strict=True):
    print(f"{length:5} tokens: softmax {1e3 * a:7.1f} ms, log {1e3 * b:6.1f} ms")

# %% [markdown]
# ## State size
#
# `state_size` returns the bytes of a layer's state after a number of tokens. Softmax attention
# caches all keys and values. Log-attention stores $H_S$ and $H_Z$, `key_depth x (value_depth + 1)`
# elements per head, for any number of tokens.

# %%
layers = {
    name: attention.build(name, model_dim=HEADS * DEPTH, num_heads=HEADS, rngs=nnx.Rngs(0))
    for name in ("softmax", "gqa", "sliding_window", "log", "additive")
}
contexts = [2**i for i in range(6, 21)]
for name, layer in layers.items():
    print(f"{name:15} {layer.state_size(1_000_000):13,} bytes after a million tokens")

# %% [markdown]
# ## One further token
#
# In generation, a model reads its whole state for every token. The key/value cache of softmax
# attention grows with each token. This cell measures the time of one token after contexts of
# several lengths.


# %%
def time_of_next(name, length):
    layer = layers[name]
    graph, parameters = nnx.split(layer)

    @jax.jit
    def step(parameters, x, state):
        return nnx.merge(graph, parameters)(x, state=state, return_state=True)

    state = layer.init_state((1,), capacity=length + 1)
    x = jax.random.normal(jax.random.key(0), (1, 512, HEADS * DEPTH))
    for _ in range(length // 512):
        _, state = step(parameters, x, state)
    return seconds(step, parameters, x[:, :1], state, times=10)


decoding_lengths = [512, 2048, 8192]
decoding = {
    name: [time_of_next(name, length) for length in decoding_lengths] for name in ("softmax", "log")
}

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
for name, values in times.items():
    axes[0].loglog(lengths, values, "o-", label=name)
axes[0].set(title="processing a sequence", xlabel="tokens", ylabel="seconds")
for name, layer in layers.items():
    axes[1].loglog(contexts, [layer.state_size(n) for n in contexts], label=name)
axes[1].set(title="state or cache", xlabel="tokens of context", ylabel="bytes")
for name, values in decoding.items():
    axes[2].semilogx(decoding_lengths, [1e3 * x for x in values], "o-", label=name)
axes[2].set(title="one further token", xlabel="tokens of context", ylabel="milliseconds")
axes[2].set_ylim(0)
for panel, ticks in zip(axes, (lengths, contexts[::7], decoding_lengths), strict=True):
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend()
plt.show()

# %% [markdown]
# ## Any length in constant memory
#
# Since only the state is carried, a sequence of any length can be processed in chunks, in the
# memory of one chunk. Here are a quarter of a million tokens, in chunks of 16,384.


# %%
@jax.jit
def read(state, key):
    query, key_, log_value = jax.random.normal(key, (3, 1, 16_384, HEADS, DEPTH))
    log_y, state = log_attention(query, key_, log_value, initial_state=state, return_state=True)
    return state, log_y[:, -1]


state, chunks = attention.LogAttentionState.empty((1,), HEADS, DEPTH, DEPTH), 16
start = time.perf_counter()
for key in jax.random.split(jax.random.key(0), chunks):
    state, last = jax.block_until_ready(read(state, key))
taken = time.perf_counter() - start
size = sum(x.nbytes for x in jax.tree.leaves(state))
print(f"{chunks * 16_384:,} tokens in {taken:.1f} s, {1e6 * taken / chunks / 16_384:.1f} us each")
print(f"state: {size:,} bytes")

# %% [markdown]
# A state of constant size cannot contain everything. Notebooks 4 and 5 show what it does contain.
