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
# # 7. From softmax attention to constant cost
#
# A trained model with softmax attention is converted into one with a state of constant size. No
# pretrained weights are downloaded here: a small Llama is trained first, for a minute, and written
# in the format of the library transformers. From there on, it is treated like any checkpoint.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from heinsen_jax.config import load_config
from heinsen_jax.generate import generate
from heinsen_jax.interop.transformers import from_pretrained, import_model, to_pretrained
from heinsen_jax.linearize import Options, linearize
from heinsen_jax.models import Layers
from heinsen_jax.runs.load import load_text_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train

WORK = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A small Llama
#
# The `llama` block with grouped key/value heads is the architecture of Llama: RMS norms, a SwiGLU
# MLP, rotary positions. It is trained on the source of this machine's Python library, with a BPE of
# 2048 tokens.

# %%
base = load_config("python_code")
teacher = replace(
    base,
    model=replace(
        base.model,
        block="llama",
        attention=Layers("gqa", options={"num_kv_heads": 2}),
        tie_embeddings=True,
    ),
    data=replace(base.data, cache=str(WORK), sequence_length=128, batch_size=8, test_lengths=()),
    optimizer=replace(base.optimizer, name="muon", learning_rate=8e-3, warmup_steps=30),
    training=replace(
        base.training,
        steps=300,
        log_every=50,
        evaluate_every=300,
        evaluation_batches=10,
        sample_tokens=0,
        loss_by_position=False,
    ),
)
train(prepare_run(teacher, WORK / "teacher"))
model, tokenizer, _ = load_text_run(WORK / "teacher")

# %% [markdown]
# ## Export and import
#
# `to_pretrained` writes `config.json`, `model.safetensors` and `tokenizer.json`, which
# `AutoModelForCausalLM.from_pretrained` of transformers loads, too. The round trip is exact.

# %%
folder = to_pretrained(model, WORK / "llama", tokenizer=tokenizer)
print(*sorted(path.name for path in folder.iterdir()), sep="\n")
again, tokenizer = from_pretrained(folder)
prompt = jnp.asarray(tokenizer.encode("class Attention:\n    def "))
np.testing.assert_array_equal(model(prompt), again(prompt))

# %% [markdown]
# ## Linearize
#
# `log_window` has exact softmax attention over the last 16 tokens, merged with log-attention over
# all earlier ones. The checkpoint is imported into a folder, which `linearize` reads; it has no
# record of its training text, so `data` names one. New layers are
# fitted to the teacher's; attention transfer trains the features of log-attention, and nothing
# else, to reproduce the output of each attention layer; then the whole model is trained. On the
# command line, without the settings for this small model:
#
#     python -m heinsen_jax.interop.transformers import llama --workdir imported
#     python -m heinsen_jax.linearize --model imported --workdir linear --data python-stdlib \
#         --attention log_window:window_size=16 --transfer-steps 60 --steps 60 --no-baselines

# %%
import_model(folder, WORK / "imported")
options = Options(
    model=str(WORK / "imported"),
    workdir=str(WORK / "linear"),
    data=base.data.corpus,
    attention=("log_window:window_size=16",),
    transfer_steps=60,
    steps=60,
    baselines=False,
)
settings = {
    "data.cache": WORK,
    "data.sequence-length": 128,
    "data.batch-size": 8,
    "optimizer.learning-rate": 1e-3,
    "training.log-every": 10,
    "training.evaluation-batches": 10,
}
linearize(options, [f"--{field}={value}" for field, value in settings.items()])

# %%
rows = read_metrics(WORK / "linear-transfer")
points = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
plt.figure(figsize=(6, 3.2))
plt.plot(*zip(*points, strict=True), "o-")
plt.xlabel("step of attention transfer")
plt.ylabel("relative error of attention layers")
plt.yscale("log")
plt.grid(alpha=0.3)

# %% [markdown]
# ## Generate text
#
# The linearized model continues the same prompt. Its state has the same size after any number of
# tokens, where the keys and values of the teacher grow.

# %%
linear, _, _ = load_text_run(WORK / "linear")
for name, each in (("teacher", model), ("linearized", linear)):
    new = generate(each, prompt, 60, top_k=1, num_tokens=tokenizer.vocab_size)
    print(f"--- {name}")
    print(tokenizer.decode([*prompt.tolist(), *new.tolist()]))

# %%
lengths = 2 ** np.arange(6, 17)
for name, each in (("teacher", model), ("linearized", linear)):
    plt.plot(lengths, [each.state_size(int(length)) for length in lengths], "o-", label=name)
plt.xscale("log")
plt.yscale("log")
plt.xlabel("tokens")
plt.ylabel("bytes of state")
plt.grid(alpha=0.3)
plt.legend()
