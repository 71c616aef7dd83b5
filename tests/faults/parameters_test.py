"""The parameters that weight decay and Muon choose, by name, for every mechanism and for all other
parts of the model."""

from typing import Any

import jax
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.training.optimizer import decay_mask, make_optimizer

HEADS = {"project.kernel", "output.kernel"}
QKV = {"query.kernel", "key.kernel", "value.kernel", "output.kernel"}
LORA = {f"{part}.lora_{factor}" for part in ("project.lora", "output.lora") for factor in "ab"}
RANKS = {"decay.down.kernel", "decay.up.kernel"}
FEATURES = {"query_features", "key_features"}
MATRICES: dict[str, set[str]] = {
    "log": HEADS | {"gate.kernel"},
    "softmax": HEADS,
    "gqa": HEADS,
    "mla": {"query.kernel", "down.kernel", "key_up", "value_up", "output.kernel"},
    "sliding_window": HEADS,
    "dilated": HEADS,
    "longformer": HEADS | {"project_global.kernel"},
    "tglobal": HEADS,
    "block_sparse": HEADS,
    "memory_compressed": HEADS | {"of_keys.kernel", "of_values.kernel"},
    "linformer": HEADS | {"of_keys", "of_values"},
    "linear": HEADS,
    "performer": HEADS,
    "colt5": {f"{branch}.{name}" for branch in ("light", "heavy") for name in HEADS},
    "rmt": {f"attention.{name}" for name in HEADS},
    "l1": HEADS,
    "l1_sparse": HEADS,
    "additive": {"query.kernel", "key.kernel", "value.kernel", "project.kernel"},
    "retnet": QKV | {"gate.kernel"},
    "gla": QKV | RANKS | {"gate.kernel"},
    "hgrn2": QKV,
    "mamba2": QKV | {"gate.kernel", "step.kernel"},
    "deltanet": QKV | {"beta.kernel"},
    "gated_deltanet": QKV | {"beta.kernel", "decay.kernel", "gate.kernel"},
    "kda": QKV | RANKS | {"beta.kernel", "gate.down.kernel", "gate.up.kernel"},
    "mlstm": QKV | {"gate.kernel", "input_gate.kernel", "forget_gate.kernel"},
    "taylor": HEADS,
    "fox": HEADS | {"forget_gate.kernel"},
    "log_window": HEADS | FEATURES,
    "gated_deltaproduct": QKV | {"beta.kernel", "decay.kernel", "gate.kernel"},
    "gated_deltanet2": QKV
    | RANKS
    | {"beta.kernel", "write.kernel", "gate.down.kernel", "gate.up.kernel"},
    "rwkv7": QKV
    | RANKS
    | {f"{name}.{part}.kernel" for name in ("rate", "gate") for part in ("down", "up")},
    "goom_ssm": {"transition"}
    | {f"{name}.kernel" for name in ("input", "readout", "skip", "output")},
    "short_convolution": {
        *("input_gate.kernel", "output_gate.kernel", "value.kernel", "output.kernel")
    },
}
"""The matrices of each mechanism with its defaults."""

CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    *((name, {}, matrices) for name, matrices in MATRICES.items()),
    ("softmax", {"lora_rank": 2, "query_key_norm": True}, HEADS | LORA),
    ("log", {"decay": "head"}, HEADS | {"gate.kernel", "decay_proj.kernel"}),
    ("log", {"features": "hedgehog", "gated": False}, HEADS | FEATURES),
    ("mla", {"query_rank": 4}, MATRICES["mla"] | {"query_down.kernel"}),
    ("hgrn2", {"lower_bound": 0.3}, QKV),
    ("log_window", {"decay": "head"}, HEADS | FEATURES | {"decay_proj.kernel"}),
]
MLP = {"mlp.up.kernel", "mlp.down.kernel"}
SIZES = {"vocab_size": 11, "model_dim": 16, "num_layers": 2, "num_heads": 2}
MUON = OptimizerConfig(name="muon")


def decayed(parameters: nnx.State) -> set[str]:
    """Names of the decayed parameters."""
    mask = flatten_with_names(decay_mask(parameters))
    return {name.removesuffix(".value") for name, is_decayed in mask.items() if is_decayed}


def orthogonalized(parameters: nnx.State) -> set[str]:
    """Names of the parameters of which Muon's state has no second moment."""
    state = jax.eval_shape(make_optimizer(MUON).init, parameters)
    moments = tuple(flatten_with_names(state))
    return {
        name.removesuffix(".value")
        for name in flatten_with_names(parameters)
        if not any(moment.endswith(f".nu.{name}") for moment in moments)
    }


def parameters_of(**fields: Any) -> nnx.State:
    return nnx.state(LanguageModel.abstract(LanguageModelConfig(**SIZES | fields)), nnx.Param)


def test_the_table_has_every_mechanism():
    assert set(MATRICES) == set(attention.names())


@pytest.mark.parametrize(("name", "options", "matrices"), CASES)
def test_matrices_of_mechanisms_are_decayed_and_orthogonalized(name, options, matrices):
    layer = nnx.eval_shape(
        lambda: attention.build(name, model_dim=16, num_heads=2, rngs=nnx.Rngs(0), **options)
    )
    parameters = nnx.state(layer, nnx.Param)
    assert decayed(parameters) == matrices
    assert orthogonalized(parameters) == matrices


PARTS: list[tuple[dict[str, Any], set[str], set[str]]] = [
    ({}, {"embed.embedding", "position.dense.kernel"}, MLP),
    ({"tie_embeddings": False, "positions": "none"}, {"embed.embedding", "unembed.embedding"}, MLP),
    (
        {"embedding_style": "fastformer", "max_length": 8},
        {"embed.embedding", "position.embedding"},
        MLP,
    ),
    (
        {"block": "llama", "convolution_size": 4, "tie_embeddings": True},
        {"embed.embedding"},
        MLP | {"mlp.gate.kernel"},
    ),
]


@pytest.mark.parametrize(("fields", "embeddings", "matrices"), PARTS)
def test_embeddings_are_decayed_and_have_adam_and_norms_biases_and_convolutions_neither(
    fields, embeddings, matrices
):
    parameters = parameters_of(**{"attention": "softmax", "block": "standard"} | fields)
    of_layers = {f"blocks.0.{x}" for x in matrices} | {f"blocks.0.attention.{x}" for x in HEADS}
    assert decayed(parameters) == embeddings | of_layers
    assert orthogonalized(parameters) == of_layers


def test_a_parameter_without_a_kind_is_refused():
    parameters = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    with pytest.raises(ValueError, match="parameter bias has no kind; make it with"):
        make_optimizer(OptimizerConfig()).init(parameters)
