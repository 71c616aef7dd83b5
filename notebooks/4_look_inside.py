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
# # 4. Train one, and look inside
#
# A small model learns the source of Python's standard library, byte by byte, in less than a minute
# on a laptop. Then we look at what it does: whom its tokens attend to, what its state holds, how
# long it remembers; and let it write.

# %%
import contextlib
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from heinsen_jax import data
from heinsen_jax.config import load_config, record
from heinsen_jax.generate import generate
from heinsen_jax.training.checkpoint import load_run
from heinsen_jax.training.loop import train
from heinsen_jax.training.metrics import read_metrics

# %% [markdown]
# A configuration is a value: take one that there is, and change what you like. This is the
# quickstart's, with 200 steps, in the standard block (attention, then an MLP), one layer of
# log-attention with decay, and one of additive attention.

# %%
ROOT = Path.cwd() if (Path.cwd() / "configs").exists() else Path.cwd().parent
base = load_config(ROOT / "configs" / "quickstart.py")
config = replace(
    base,
    model=replace(
        base.model,
        num_layers=2,
        model_dim=64,
        attention=("log", "additive"),
        # "scan" takes the least time to compile, and no more to run on texts this short
        attention_options=(("log.decay", "feature"), ("log.implementation", "scan")),
        block="standard",
        convolution_size=4,
    ),
    data=replace(base.data, sequence_length=64, cache=str(ROOT / "data")),
    training=replace(base.training, steps=200, evaluate_every=200, sample_tokens=0, log_every=10),
)
workdir = Path(tempfile.mkdtemp()) / "run"
workdir.mkdir()
dataset = data.load(config.data)
record(workdir, config, dataset)
with contextlib.redirect_stdout(io.StringIO()):  # a progress bar, if this were a terminal
    result = train(workdir, dataset, config)
print({name: round(value, 3) for name, value in result.metrics.items()})

# %%
rows = [row for row in read_metrics(workdir) if "train/loss" in row]
plt.figure(figsize=(5, 3))
plt.plot([row["step"] for row in rows], [row["train/loss"] for row in rows])
plt.xlabel("step")
plt.ylabel("loss (nats per byte)")
plt.grid(alpha=0.3)

# %% [markdown]
# The run's folder has all of it: configuration, metrics, checkpoints, tokenizer. `load_run` gives
# the model back.

# %%
model, tokenizer, step = load_run(workdir)
text = "def read(self, size=-1):\n    return self.file.read(size)\n"
tokens = jnp.array(tokenizer.encode_ordinary(text))
letters = [repr(c)[1:-1] for c in text]


def layer(turn, number=0):
    """A block of the model, out of the stack that it is kept in."""
    graph, parameters = nnx.split(model.blocks[turn])
    return nnx.merge(graph, jax.tree.map(lambda x: x[number], parameters))


def attention_input(tokens):
    """What the first block's attention is given."""
    x, _ = model.position(model.embed(tokens), state=model.position.init_state(()))
    block = layer(0)
    x, _ = block.convolutions[0](block.norm(x), state=None)
    return block.attention, x


# %% [markdown]
# ## Whom a token attends to
#
# Log-attention never forms attention weights, but they are well defined: what token $t$ takes from
# token $s$ is in proportion to $\sum_i \exp(Q_{ti} + K_{si} + D_{ts,i})$, where $D$ is the decay of
# feature $i$ between them. `importance` computes them.

# %%
log_layer, x = attention_input(tokens)
weights = log_layer.importance(x)
_, _, log_value = log_layer.heads(x)
by_hand = log_layer.out_proj(jnp.log(jnp.einsum("tsh,shv->thv", weights, jnp.exp(log_value))))
print("these weights give the layer's own result, but for", jnp.abs(by_hand - log_layer(x)).max())

figure, axes = plt.subplots(1, 4, figsize=(16, 4.4), layout="constrained")
for head, panel in enumerate(axes):
    panel.imshow(weights[:, :, head], cmap="magma")
    panel.set_title(f"head {head}")
    panel.set_xticks(range(len(letters)), letters, fontsize=5)
    panel.set_yticks(range(len(letters)), letters, fontsize=5)

# %% [markdown]
# Rows that fade to the left show decay; vertical lines are tokens with large keys. A sharp
# row, all of one token, is rare: that would take a very large key.
#
# ## Which tokens matter
#
# Additive attention (Fastformer) has no pairs at all. Each token has one weight a head, for its
# query and for its key, and what is pooled under these weights is what all see.

# %%
x_after, _ = model.position(model.embed(tokens), state=model.position.init_state(()))
x_after, _ = layer(0)(x_after, state=None, return_state=False)
block = layer(1)
normed, _ = block.convolutions[0](block.norm(x_after), state=None)
of_queries, of_keys = block.attention.importance(normed)

figure, axes = plt.subplots(2, 1, figsize=(14, 3.2), layout="constrained", sharex=True)
for panel, weights, name in zip(axes, (of_queries, of_keys), ("queries", "keys"), strict=True):
    panel.imshow(weights[-1].T, cmap="magma", aspect="auto")  # as the last token sees them
    panel.set_ylabel(f"head, {name}")
axes[1].set_xticks(range(len(letters)), letters, fontsize=7)

# %% [markdown]
# ## What the state holds
#
# After the text, each head of log-attention has $H_S$ and $H_Z$. Their difference is what each key
# feature remembers: a log-average of the values, and by how much a feature outweighs the others
# says how much has been written to it lately.

# %%
_, state = model(tokens, return_state=True)
held = jax.tree.map(lambda x: x[0], state.blocks[0]).attention
figure, axes = plt.subplots(1, 4, figsize=(14, 2.8), layout="constrained")
for head, panel in enumerate(axes):
    image = panel.imshow(
        held.log_s[head] - held.log_z[head][:, None], cmap="coolwarm", aspect="auto"
    )
    panel.set(title=f"head {head}", xlabel="value feature", ylabel="key feature")
    figure.colorbar(image, ax=panel)

# %% [markdown]
# How long does a feature remember? The decay of each token says so: a feature that is multiplied by
# $f$ at every token halves in $\log 2 / -\log f$ tokens.

# %%
fade = jax.nn.log_sigmoid(log_layer.decay_proj(x))  # [tokens, heads x features]
half_life = np.log(2) / -np.asarray(fade.mean(0))
plt.figure(figsize=(5, 3))
plt.hist(np.log10(half_life), 30)
plt.xlabel("log10 of the tokens in which a feature halves")
plt.ylabel("features of all heads")
print(f"from {half_life.min():.1f} to {half_life.max():.0f} tokens")

# %% [markdown]
# ## Let it write
#
# Each further byte costs the same, and what the model keeps stays as large as it is.

# %%
prompt = jnp.array(tokenizer.encode_ordinary("def "))
written = generate(model, prompt, 300, temperature=0.8, top_k=40, key=jax.random.key(0))
print("def " + tokenizer.decode(written.tolist(), errors="replace"))
print(
    "\nbytes of state after 304 tokens, and after a million:",
    model.state_size(304),
    model.state_size(10**6),
)
