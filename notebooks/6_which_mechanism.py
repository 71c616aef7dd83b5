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
# # 6. Which mechanism when
#
# A mechanism is a compromise between the capacity of its state and its cost. This notebook reads
# the committed results of this repository's studies: nothing is trained. The studies are small, for
# two CPU cores; `docs/studies.md` and its pages describe each, with the command that repeats it.

# %%
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import display

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from studies import (
    adjusted_p_values,
    differences_of,
    draw,
    load_study,
    results_of,
    sweeps,
)

ROOT = Path.cwd() if (Path.cwd() / "configs").exists() else Path.cwd().parent


def load(name):
    """Return a study and its results: the best learning rate of each line, with all seeds."""
    study = load_study(name)
    return study, results_of(study, ROOT / "benchmarks" / "results" / "studies" / name)


def show(study, results):
    """Show all plots of a study."""
    for plot in study.plots:
        display(draw(study.title, plot, results))


# %% [markdown]
# ## Cost
#
# Bytes of state of one sequence, in float32, for the models of the study of language models: four
# layers of width 128. Softmax attention and FoX cache the keys and values of all tokens; hybrids
# with softmax attention in one or two of four layers need a quarter or a half of that. The states
# of the others have constant size.

# %%
base = LanguageModelConfig(
    vocab_size=65, model_dim=128, num_layers=4, num_heads=4, block="decay", convolution_size=4
)
contexts = [64, 1024, 16_384, 262_144, 1_048_576]
sizes = {}
for name, fields in sweeps.language_models().items():
    chosen = {key.removeprefix("model."): value for key, value in fields.items()}
    model = LanguageModel.abstract(replace(base, **chosen))
    sizes[name] = [model.state_size(context) for context in contexts]

plt.figure(figsize=(7, 4))
for name, of_model in sizes.items():
    plt.plot(contexts, of_model, "o-", label=name)
plt.xscale("log")
plt.yscale("log")
plt.xlabel("tokens")
plt.ylabel("bytes of state")
plt.grid(alpha=0.3)
plt.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## Language
#
# Validation loss of Tiny Shakespeare after training on sequences of 64 characters, at that length
# and at 16 times that length. Dots are seeds.

# %%
study, results = load("language_model")
show(study, results)

# %% [markdown]
# Is log-attention with decay better or worse? Differences from it over five other seeds, which did
# not select learning rates, and p-values of Welch's t-test after Holm's correction for the number
# of comparisons. Losses decrease with the length of sequences, also for a window of 64, since fewer
# predictions are near the beginning of a sequence; softmax attention with rotary positions does not
# extrapolate.

# %%
study, results = load("language_model_seeds")
differences = differences_of(study, results)
for metric in ("loss", "loss_1024"):
    print(metric)
    by_model = {x.compared["model"]: x for x in differences if x.metric == metric}
    for (name,), p_value in adjusted_p_values(differences, metric).items():
        print(f"  {name:32} {by_model[name].mean:+.4f}, p = {p_value:.3f}")

# %% [markdown]
# Most differences are small here: characters of plays depend little on distant ones. Code repeats
# names that a file defined earlier. Similar models, trained on sequences of 512 tokens of Python's
# standard library and tested on 32 to 2048 tokens: which ones benefit from context?

# %%
study, results = load("code_contexts")
show(study, results)

# %% [markdown]
# Losses are of test files, learning rates were selected on others. Three layers of log-attention
# and then one of softmax attention have about the loss of FoX, and of softmax attention with ALiBi,
# in a quarter of the bytes; after layers of Gated DeltaNet, Mamba-2 or windows, softmax attention
# has a larger loss. Among states of constant size, log-attention with decay is the best of about
# 100 kB, a window of 64 tokens has a smaller loss than every recurrence alone, and alternating
# layers of both are better still. Gated DeltaNet depends on its number of heads, and needs another
# learning rate with one head.
#
# ## Scaling
#
# Models of the bytes of Python's library, with 0.2M to 3.3M parameters after 500 updates, and with
# 125 to 2000 updates. As parameters grow, all three improve at the same rate, as far as two seeds
# show. With more training, softmax attention improves faster than log-attention, and Gated DeltaNet
# more slowly: softmax attention is the worst after 125 updates, and the best after 2000.

# %%
study, results = load("scaling")
show(study, results)

# %% [markdown]
# ## Recall
#
# How many key/value pairs fit into a state of constant size? Models with two layers are trained to
# return the values of 8 keys: every causal mechanism, with its default sizes, at two widths.
# Dashed: guesses.

# %%
study, results = load("recall")
show(study, results)

# %% [markdown]
# Softmax attention, also with one key/value head, MLA and L1 attention answer all queries. Among
# states of constant size, which is the smallest that answers 90% of the queries? A second study
# changes the sizes, features and decay of log-attention, and the sizes of the delta rule.

# %%
study, results = load("recall_features")
good = [result for result in results if result.mean("accuracy") >= 0.9]
for result in sorted(good, key=lambda result: result.mean("state_bytes")):
    (name,) = result.compared.values()
    print(f"{name:36} {result.mean('state_bytes'):>8,.0f} bytes  {result.mean('accuracy'):.2f}")

# %% [markdown]
# How many pairs can a state hold? A third study trains one model on 4 to 64 pairs, by Muon. Taylor
# attention, log-attention with 256 slots and DeltaNet answer most of 64 pairs in a sixth or less of
# the bytes of all keys and values. Taylor attention has a larger mean than DeltaNet, 0.96 and 0.86,
# in nearly the same bytes. In 24 kB, DeltaNet has a larger mean than slots, but the 95% confidence
# interval of the difference, with two seeds, includes 0.

# %%
study, results = load("recall_capacity")
show(study, results)

# %% [markdown]
# ## Copying
#
# Recall in order: trained on strings of 5 to 20 letters, tested on longer ones. The capacity of a
# state of constant size limits how many letters can be copied; a cache grows with them. Yet of the
# mechanisms with a cache, only softmax attention copies strings three times as long. Selective
# copying also needs to ignore noise, and induction to find one token.

# %%
study, results = load("copying")
show(study, results)

# %% [markdown]
# ## State tracking
#
# Some sequences ask for more than an average of what was stored: after each element of a group, the
# product of all elements so far. The delta rule with negative eigenvalues learns the parity of
# bits, also of more bits than in training, though DeltaNet only with one of two seeds; none of the
# other mechanisms tested does.

# %%
study, results = load("state_tracking")
show(study, results)

# %% [markdown]
# ## Hybrids
#
# Softmax attention in one of eight, four or two layers, the first or the last of them, and
# log-attention in the others. Models recall more with softmax attention in the first layer. With
# one of eight or of four layers, every seed copies long strings better if it is the last, though
# the 95% confidence intervals of three seeds include no difference. All were trained with 800
# updates and two learning rates; what a model does not learn in them may still be within its
# capacity.

# %%
study, results = load("hybrids")
show(study, results)

# %% [markdown]
# ## Advice
#
# | task | choice |
# |---|---|
# | little use of distant tokens, long streams | a window, log-attention with decay, Mamba-2 |
# | context of some hundred tokens, constant memory | log-attention alternating with short windows |
# | use of distant tokens, with a cache | softmax in the last of two or four layers, log before it |
# | recall of some facts in constant memory | Taylor attention with Muon, DeltaNet, log with slots |
# | states that a token inverts, such as parity | the delta rule with negative eigenvalues |
# | recall of all facts | softmax attention, in all layers or the first; MLA, in fewer bytes |
# | copying of long strings | softmax attention, in all layers or perhaps the last of four |
# | less memory for a trained model | [notebook 7](7_linearize.ipynb) |
