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
# # 4. Train a model and inspect it
#
# A small model trains on the source of Python's standard library, byte by byte, in less than a
# minute on a laptop. Then this notebook shows its attention weights, the contents and time
# constants of its state, and generated text.

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

from heinsen_jax.config import load_config
from heinsen_jax.generate import generate
from heinsen_jax.models import Layers
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train

# %% [markdown]
# A configuration is a value, derived from another one by changing fields. This is the quickstart's,
# with 200 steps, in the standard block (attention, then an MLP), with one layer of log-attention
# with decay and one of additive attention.

# %%
ROOT = Path.cwd() if (Path.cwd() / "configs").exists() else Path.cwd().parent
base = load_config(ROOT / "configs" / "quickstart.py")
config = replace(
    base,
    model=replace(
        base.model,
        num_layers=2,
        model_dim=64,
        # "scan" compiles fastest, and is as fast on sequences this short
        attention=(
            Layers("log", options={"decay": "feature", "implementation": "scan"}),
            "additive",
        ),
        block="standard",
        convolution_size=4,
    ),
    data=replace(base.data, sequence_length=64, cache=str(ROOT / "data")),
    training=replace(base.training, steps=200, evaluate_every=200, sample_tokens=0, log_every=10),
)
workdir = Path(tempfile.mkdtemp()) / "run"
workdir.mkdir()
with contextlib.redirect_stdout(io.StringIO()):  # hide the progress bar
    result = train(prepare_run(config, workdir))
print({name: round(value, 3) for name, value in result.metrics.items()})

# %%
rows = [row for row in read_metrics(workdir) if "train/loss" in row]
plt.figure(figsize=(5, 3))
plt.plot([row["step"] for row in rows], [row["train/loss"] for row in rows])
plt.xlabel("step")
plt.ylabel("loss (nats per byte)")
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# The run's folder contains configuration, metrics, checkpoints and tokenizer. `load_run` restores
# the model.

# %%
model, tokenizer, step = load_run(workdir)
text = "def read(self, size=-1):\n    return self.file.read(size)\n"
tokens = jnp.array(tokenizer.encode(text))
letters = [repr(c)[1:-1] for c in text]


def layer(index, number=0):
    """Return a block of the model, taken from the stack of blocks."""
    graph, parameters = nnx.split(model.blocks[index])
    return nnx.merge(graph, jax.tree.map(lambda x: x[number], parameters))


def attention_input(tokens):
    """Return the first block's attention layer and its input."""
    x, _ = model.position(model.embed(tokens), state=model.position.init_state(()))
    block = layer(0)
    x, _ = block.convolutions[0](block.norm(x), state=None)
    return block.attention, x


# %% [markdown]
# ## Attention weights
#
# Log-attention never computes attention weights, but they are well defined: token $t$ attends to
# token $s$ in proportion to $\sum_i \exp(Q_{ti} + K_{si} + D_{ts,i})$, where $D$ is the decay of
# feature $i$ between them. `importance` computes them.

# %%
log_layer, x = attention_input(tokens)
weights = log_layer.importance(x)
_, _, log_value = log_layer.heads(x)
by_hand = log_layer.out_proj(jnp.log(jnp.einsum("tsh,shv->thv", weights, jnp.exp(log_value))))
print("largest difference from the output of the layer:", jnp.abs(by_hand - log_layer(x)).max())

figure, axes = plt.subplots(1, 4, figsize=(16, 4.4), layout="constrained")
for head, panel in enumerate(axes):
    image = panel.imshow(weights[:, :, head], cmap="magma", vmin=0, vmax=1)
    panel.set(title=f"head {head}", xlabel="key", ylabel="query")
    panel.set_xticks(range(len(letters)), letters, fontsize=5)
    panel.set_yticks(range(len(letters)), letters, fontsize=5)
figure.colorbar(image, ax=axes, label="weight")
plt.show()

# %% [markdown]
# Rows that darken to the left show decay; vertical lines are tokens with large keys. Rows with
# nearly all weight on one token are rare, since they need a very large key.
# ## Additive attention
#
# Additive attention (Fastformer) has no pairwise weights. Each token has one weight per head for
# its query and one for its key, and all tokens share the averages under these weights.

# %%
x_after, _ = model.position(model.embed(tokens), state=model.position.init_state(()))
x_after, _ = layer(0)(x_after, state=None, return_state=False)
block = layer(1)
normed, _ = block.convolutions[0](block.norm(x_after), state=None)
of_queries, of_keys = block.attention.importance(normed)

figure, axes = plt.subplots(2, 1, figsize=(14, 4), layout="constrained", sharex=True)
for panel, weights, name in zip(axes, (of_queries, of_keys), ("queries", "keys"), strict=True):
    image = panel.imshow(weights[-1].T, cmap="magma", aspect="auto")  # at the last token
    panel.set(title=f"weights of {name}", ylabel="head", yticks=range(weights.shape[-1]))
    figure.colorbar(image, ax=panel)
axes[1].set_xticks(range(len(letters)), letters, fontsize=7)
axes[1].set_xlabel("token")
plt.show()

# %% [markdown]
# ## Contents of the state
#
# After the sequence, each head of log-attention has a state $(H_S, H_Z)$. The difference of the two
# is the log of the average value under each key feature.

# %%
_, state = model(tokens, return_state=True)
first_state = state.blocks[0].attention
figure, axes = plt.subplots(1, 4, figsize=(14, 2.8), layout="constrained")
for head, panel in enumerate(axes):
    log_average = first_state.log_s[head] - first_state.log_z[head][:, None]
    limit = jnp.abs(log_average).max()  # white is 0
    image = panel.imshow(log_average, cmap="coolwarm", aspect="auto", vmin=-limit, vmax=limit)
    panel.set(title=f"head {head}", xlabel="value feature", ylabel="key feature")
    figure.colorbar(image, ax=panel)
plt.show()

# %% [markdown]
# Decay determines the time constant of a feature: one that is multiplied by $f$ at every token
# has the half-life $\log 2 / -\log f$ tokens.

# %%
log_decay = jax.nn.log_sigmoid(log_layer.decay_proj(x))  # [tokens, heads x features]
half_life = np.log(2) / -np.asarray(log_decay.mean(0))
plt.figure(figsize=(5, 3))
plt.hist(half_life, np.geomspace(half_life.min(), half_life.max(), 30))
plt.xscale("log")
plt.xlabel("half-life (tokens)")
plt.ylabel("number of features")
plt.show()
print(f"from {half_life.min():.1f} to {half_life.max():.0f} tokens")

# %% [markdown]
# ## Generation
#
# Every byte costs the same, and the size of the state is constant.

# %%
prompt = jnp.array(tokenizer.encode("def "))
generated = generate(model, prompt, 300, temperature=0.8, top_k=40, key=jax.random.key(0))
print("def " + tokenizer.decode(generated.tolist()))
print(
    "\nbytes of state after 304 tokens, and after a million:",
    model.state_size(304),
    model.state_size(10**6),
)
