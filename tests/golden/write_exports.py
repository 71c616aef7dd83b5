"""Write the models of `tests/golden/transformers` by `to_pretrained`, without the originals, and
linearized ones with their logits.

    python tests/golden/write_exports.py FOLDER
    make/bin/python tests/golden/make_transformers.py check FOLDER

The second command, in an environment of transformers, reads and records them.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.interop.transformers import from_pretrained, to_pretrained
from heinsen_jax.models import LanguageModel
from heinsen_jax.models.conversion import linear_layers, shared_weights
from heinsen_jax.pytrees import flatten_with_names

FOLDER = Path(__file__).resolve().parent / "transformers"
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 21))
LINEARIZED = {"llama3": "mamba2:key_depth=8", "qwen3": "gated_deltanet:key_depth=6"}
"""Originals of linearized models, and the mechanisms of their new layers."""


def linearized(name: str) -> LanguageModel:
    """An original with another mechanism in its first layer, and all weights moved."""
    teacher, _ = from_pretrained(FOLDER / name, param_dtype="float32")
    config = linear_layers(teacher.config, LINEARIZED[name], ["1"])
    model, rng = LanguageModel(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    state, given = nnx.state(model, nnx.Param), shared_weights(config, teacher)
    leaves = [
        jnp.asarray(given.get(name, x) + 0.1 * rng.standard_normal(x.shape), jnp.float32)
        for name, x in flatten_with_names(state).items()
    ]
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return model


def main(output: Path) -> None:
    for config in FOLDER.glob("*/config.json"):
        model, tokenizer = from_pretrained(config.parent)
        to_pretrained(model, output / config.parent.name, tokenizer=tokenizer)
    for name in LINEARIZED:
        model = linearized(name)
        folder = to_pretrained(model, output / f"{name}_linearized")
        np.savez(folder / "expected.npz", tokens=TOKENS, logits=model(TOKENS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
