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
# # 5. Associative recall
#
# *Associative recall* shows the limits of a state of constant size. A sequence is a list of
# key/value pairs, followed by some of the keys, for which the model has to predict the values:
#
#     k1 v1  k2 v2  k3 v3  ...   k2 [v2]   k1 [v1]   ...
#
# Softmax attention caches every pair and attends to the matching one. A mechanism with a state of
# constant size must store all pairs in it. How many fit?

# %%
import contextlib
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from heinsen_jax import data
from heinsen_jax.config import OptimizerConfig, load_config
from heinsen_jax.data import Recall
from heinsen_jax.models import Layers
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train

# %% [markdown]
# ## The task
#
# `Recall` generates an unlimited number of examples. Only answers count in the loss and in the
# accuracy: all other tokens are random.

# %%
task = Recall(
    vocab_size=64, num_pairs=4, sequence_length=32, batch_size=32, validation_examples=256
)
draw = data.TaskDataset(task).train_row(task, seed=0)
tokens, is_answer, *_ = draw(0)
print("tokens: ", tokens)
print("answers:", np.where(is_answer, tokens[1:], 0))

# %% [markdown]
# ## Comparison of mechanisms
#
# Each mechanism is trained in the same small model, derived from `configs/recall.py`: two layers of
# width 32, with a convolution of two tokens before each branch, which combines a key with its
# value. Each run has a few hundred steps and needs some seconds on a CPU.

# %%
ROOT = Path.cwd() if (Path.cwd() / "configs").exists() else Path.cwd().parent
base = load_config(ROOT / "configs" / "recall.py")
base = replace(
    base,
    model=replace(base.model, vocab_size=64, model_dim=32, convolution_size=2),
    data=task,
    optimizer=OptimizerConfig(learning_rate=5e-3, end_learning_rate=5e-4, warmup_steps=20),
    training=replace(base.training, steps=240, evaluate_every=80, log_every=80),
)
MECHANISMS = {
    "softmax": "softmax",
    "sliding window": Layers("sliding_window", options={"window_size": 8}),
    "linear": "linear",
    # values of any sign; the implementation that compiles fastest
    "log": Layers("log", options={"values": "linear", "implementation": "scan"}),
}


def accuracy_over_time(config):
    """Return the accuracy on validation examples at each evaluation."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(prepare_run(config, folder))
        rows = read_metrics(Path(folder))
    return [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]


curves = {}
for name, attention in MECHANISMS.items():
    config = replace(base, model=replace(base.model, attention=attention))
    curves[name] = accuracy_over_time(config)
    print(f"{name:15} {curves[name][-1]:.3f}")

# %%
plt.figure(figsize=(6, 3.6))
for name, curve in curves.items():
    plt.plot(80 * np.arange(1, len(curve) + 1), curve, "o-", label=name)
plt.xlabel("step")
plt.ylabel("accuracy of answers")
plt.grid(alpha=0.3)
plt.legend()

# %% [markdown]
# A window loses old tokens. A state of constant size stores a few pairs, and more of them with more
# features: 32 bits for each combination of a key feature and a value feature.
# ## Capacity of the state
#
# Log-attention with 2 and with 8 pairs, at the same sequence length: only the number of pairs to
# store changes.

# %%
capacities = {}
for pairs in (2, 8):
    for depth in (4, 16):
        model = replace(base.model, attention=MECHANISMS["log"], key_depth=depth)
        config = replace(base, data=replace(task, num_pairs=pairs), model=model)
        capacities[pairs, depth] = accuracy_over_time(config)[-1]
        print(f"{pairs} pairs, {depth} key features per head: {capacities[pairs, depth]:.3f}")

# %% [markdown]
# These are small models and few steps. A study compares all mechanisms on longer sequences, with
# tuned learning rates:
#
#     python -m studies recall --jobs 2
