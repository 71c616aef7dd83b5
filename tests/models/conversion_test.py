"""Conversion of a model to other attention layers: its architecture and its weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from heinsen_jax.models.conversion import (
    layers_without_positions,
    linear_layers,
    new_parameters,
    shared_weights,
    unused_parameters,
    with_lora,
    without_lora,
)
from heinsen_jax.pytrees import flatten_with_names

HEDGEHOG = Layers("log", options={"values": "linear", "features": "hedgehog"})


def config(attention, **fields) -> LanguageModelConfig:
    sizes = {"vocab_size": 264, "model_dim": 16, "num_layers": 4, "num_heads": 2}
    return LanguageModelConfig(attention=attention, block="llama", **sizes, **fields)


def model(attention, seed=0, **fields) -> LanguageModel:
    return LanguageModel(config(attention, **fields), rngs=nnx.Rngs(seed))


def of_layer(model: LanguageModel, layer: int):
    """A block, unstacked."""
    pattern = len(model.blocks)
    graph, parameters = nnx.split(model.blocks[layer % pattern])
    return nnx.merge(graph, jax.tree.map(lambda x: x[layer // pattern], parameters))


TEACHER = LanguageModelConfig(
    vocab_size=8,
    model_dim=16,
    num_heads=4,
    num_layers=4,
    block="llama",
    attention=Layers("gqa", options={"num_kv_heads": 2, "query_key_norm": True}),
)


def test_layers_keep_the_options_of_the_teacher():
    chosen = linear_layers(TEACHER, "log:features=hedgehog", ["1::2"])
    options = {"values": "linear", "num_kv_heads": 2, "query_key_norm": True}
    expected = Layers("log", options=options | {"features": "hedgehog"})
    assert chosen.layers == (expected, *TEACHER.layers)  # the shortest period
    assert [layer.mechanism for layer in linear_layers(TEACHER, "taylor", ["0", "-1"]).layers] == [
        "gqa",
        "taylor",
        "taylor",
        "gqa",
    ]
    window = Layers("sliding_window", options={"window_size": 8, "positions": "rotary"})
    (layer,) = linear_layers(replace(TEACHER, attention=window), "log_window").mechanisms()
    assert (layer.window_size, layer.positions) == (64, "rotary")
    deep = replace(TEACHER, key_depth=8, value_depth=8, attention="softmax")
    (layer,) = linear_layers(deep, "linear").mechanisms()
    assert (layer.key_depth, layer.num_kv_heads) == (8, None)


def test_a_pattern_of_mechanisms_is_repeated_over_all_layers():
    """Also over layers that stay, and over a part of its length at the end."""
    pattern = linear_layers(TEACHER, ["taylor:repeats=2", "sliding_window:window_size=5"], ["1"])
    names = [layer.mechanism for layer in pattern.layers]
    assert names == ["taylor", "gqa", "sliding_window", "taylor"]


@pytest.mark.parametrize(
    ("attention", "keep", "said"),
    [
        ("logg", (), "'logg': unknown"),
        ("log:feature=hedgehog", (), "attention='log:feature=hedgehog.*: log.feature: no such"),
        ("log", ("4",), "keep='4': no such layers of 4"),
        ("log", ("9:",), "keep='9:': no such layers of 4"),
        ("log", ("a",), "keep='a'"),
        ("log softmax", (), "unknown"),
    ],
)
def test_layers_that_do_not_exist_are_refused(attention, keep, said):
    with pytest.raises(UserError, match=said):
        linear_layers(TEACHER, attention, keep)


def test_hybrid_teachers_keep_their_layers_of_constant_state():
    linear = Layers("gated_deltanet", options={"num_key_heads": 2, "num_value_heads": 8})
    gated = Layers("softmax", options={"output_gate": "head"})
    teacher = replace(TEACHER, attention=(linear, gated))
    kept, new = linear_layers(teacher, "gated_deltanet").layers
    assert kept == linear
    assert (new.mechanism, "num_key_heads" in new.options) == ("gated_deltanet", False)
    (_, window) = linear_layers(teacher, "sliding_window").layers
    assert window.options == {"output_gate": "head"}
    scaled = replace(TEACHER, attention=Layers("softmax", options={"scale": 0.1}))
    with pytest.raises(UserError, match=r"have scale=0\.1, but taylor has no such option"):
        linear_layers(scaled, "taylor")
    for field in ("norm_after=true", "has_mlp=false"):
        with pytest.raises(UserError, match="leave out norm_after and has_mlp"):
            linear_layers(TEACHER, f"taylor:{field}")


@pytest.mark.parametrize("name", ["short_convolution", "goom_ssm"])
def test_recurrent_layers_stay(name):
    teacher = LanguageModelConfig(block="llama", attention=(name, "softmax"), num_layers=4)
    assert linear_layers(teacher, "taylor").layer_pattern == (name, "taylor")


@pytest.mark.parametrize(("old", "new"), [("gqa+mamba2", "log"), ("softmax", "log+mamba2")])
def test_mechanisms_in_parallel_are_refused(old, new):
    teacher = LanguageModelConfig(block="llama", attention=old)
    with pytest.raises(UserError, match="layers with mechanisms in parallel cannot be replaced"):
        linear_layers(teacher, new)


def test_norms_and_mlps_stay_where_they_are():
    pattern = Layers("softmax", norm_after=True), Layers("softmax", has_mlp=False)
    teacher = LanguageModelConfig(block="llama", attention=pattern, num_layers=4)
    layers = linear_layers(teacher, "taylor", ["3"]).layers
    assert [layer.norm_after for layer in layers] == [True, False, True, False]
    assert [layer.has_mlp for layer in layers] == [True, False, True, False]
    lora = with_lora(teacher, 2)
    assert [layer.norm_after for layer in lora.layers] == [True, False]


def test_options_that_the_new_mechanism_refuses_are_named():
    alibi = replace(TEACHER, attention=Layers("softmax", options={"positions": "alibi"}))
    with pytest.raises(UserError, match=r"attention='log_window': .*positions"):
        linear_layers(alibi, "log_window")


def test_weights_are_matched_by_layer():
    source = model(("softmax", "linear"))
    ours = config(("softmax", "linear", HEDGEHOG, "linear"))
    shared = shared_weights(ours, source)
    kernels = shared["blocks.2.attention.project.kernel.value"]
    np.testing.assert_array_equal(kernels[0], of_layer(source, 2).attention.project.kernel[...])
    kernels = shared["blocks.1.mlp.up.kernel.value"]
    np.testing.assert_array_equal(kernels[0], of_layer(source, 1).mlp.up.kernel[...])
    wanted = flatten_with_names(nnx.state(LanguageModel(ours, rngs=nnx.Rngs(0))))
    assert (
        wanted.keys() - shared.keys()
        == new_parameters(ours, source.config)
        == {
            "blocks.2.attention.query_features.value",
            "blocks.2.attention.key_features.value",
        }
    )


def test_layers_that_stay_keep_their_trained_features():
    """New layers of the same mechanism have another place in the layer pattern."""
    half = linear_layers(config("softmax"), "log:features=hedgehog", ["1::2"])
    whole = linear_layers(half, "log:features=hedgehog", ["0::2"])
    assert whole.layers == (half.layers[0], half.layers[0])
    source = LanguageModel(half, rngs=nnx.Rngs(0))
    shared, name = shared_weights(whole, source), "attention.key_features"
    np.testing.assert_array_equal(
        shared[f"blocks.0.{name}.value"], source.blocks[0].attention.key_features[...]
    )
    assert f"blocks.1.{name}.value" in new_parameters(whole, half)
    together = replace(whole, attention=whole.layers[0])
    with pytest.raises(UserError, match=rf"blocks\.0\.{name} .*repeat .* to 2 layers"):
        shared_weights(together, source)


def test_mechanisms_in_parallel():
    """Only parts of equal sizes have weights in common, and LoRA is added in each part."""
    sizes = {"gqa.num_kv_heads": 1, "mamba2.num_value_heads": 2, "mamba2.value_depth": 24}
    source = model(Layers("gqa+mamba2", options=sizes))
    options = sizes | {"mamba2.num_value_heads": 4, "mamba2.value_depth": 12}
    ours = config(Layers("gqa+mamba2", options=options | {"gqa.lora_rank": 2}))
    in_layers = {x.split(".", 3)[3] for x in shared_weights(ours, source) if ".attention." in x}
    assert in_layers == {f"gqa.{x}.kernel.value" for x in ("project", "output")}
    tuned = LanguageModel(ours, rngs=nnx.Rngs(0))
    tuned.blocks[0].attention.gqa.output.lora.lora_b[...] = jnp.ones((4, 2, 16))
    same, tokens = without_lora(tuned), jnp.arange(6)
    assert not any("lora" in name for name in flatten_with_names(nnx.state(same)))
    np.testing.assert_allclose(same(tokens), tuned(tokens), atol=1e-5)
    with pytest.raises(UserError, match=r"output_multiplier=0\.5, but deltanet has no"):
        linear_layers(config(Layers("gqa", options={"output_multiplier": 0.5})), "deltanet")


def test_mechanisms_without_lora_are_refused():
    assert with_lora(config(("linear", "softmax")), 2).layers[1].options == {"lora_rank": 2}
    with pytest.raises(UserError, match="lora_rank=2: mla has no LoRA; leave it out"):
        with_lora(config(("mla", "softmax")), 2)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_projections_of_queries_keys_and_values_are_those_of_heads(num_kv_heads):
    grouped = Layers("gqa", options={"num_kv_heads": num_kv_heads})
    source = model(grouped)
    sizes = {"key_depth": 8, "value_depth": 8}
    ours = config((Layers("deltanet", options=sizes), grouped))
    shared = shared_weights(ours, source)
    new = {name.split(".")[3] for name in new_parameters(ours, source.config)}
    assert new == {"beta", "convolutions", "norm"}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    wanted = of_layer(source, 2).attention.heads(x)
    for name, array in zip(("query", "key", "value"), wanted, strict=True):
        kernel = shared[f"blocks.0.attention.{name}.kernel.value"][1]
        found = (x @ kernel).reshape(5, 2, 8)
        repeated = jnp.repeat(array, 2 // array.shape[-2], -2)
        np.testing.assert_allclose(found, repeated, rtol=1e-5, atol=1e-6)


def test_gates_do_not_start_from_keys():
    """The keys of HGRN2 are the logits of its forget gates."""
    sizes = {"key_depth": 8, "value_depth": 8}
    ours = config(Layers("hgrn2", options=sizes))
    new = {name.split(".")[3] for name in new_parameters(ours, config("softmax"))}
    assert new == {"key", "norm"}


def test_heads_of_other_sizes_have_nothing_in_common():
    """Their matrices have the same shapes, and other columns for each head."""
    wide = Layers("softmax", options={"key_depth": 4, "value_depth": 16})
    equal = Layers("softmax", options={"key_depth": 8, "value_depth": 8})
    shapes = [of_layer(model(x), 0).attention.project.kernel.shape for x in (wide, equal)]
    assert shapes[0] == shapes[1]
    new = new_parameters(config((wide, equal)), config(equal))
    assert new == {f"blocks.0.attention.{name}.kernel.value" for name in ("output", "project")}
    narrow = {"num_value_heads": 8, "key_depth": 4, "value_depth": 4}
    delta = config(Layers("gated_deltanet", options=narrow))
    names = flatten_with_names(nnx.state(LanguageModel.abstract(delta), nnx.Param)).keys()
    shared = names - new_parameters(delta, config(equal))
    assert not any("attention" in name for name in shared)


@pytest.mark.parametrize("mechanism", ["gla", "deltanet", "gated_deltanet", "log_window"])
def test_a_teacher_with_normalized_queries_and_keys_gets_any_mechanism(mechanism):
    teacher = config("softmax", qk_norm=True)
    chosen = linear_layers(teacher, mechanism, ["1::2"])
    assert chosen.layer_pattern == (mechanism, "softmax")
    kept, (theirs,) = chosen.mechanisms()[1], teacher.mechanisms()
    assert kept == theirs
    is_inherited = mechanism == "log_window"
    assert getattr(chosen.mechanisms()[0], "query_key_norm", False) == is_inherited
    shared = shared_weights(chosen, LanguageModel(teacher, rngs=nnx.Rngs(0)))
    assert "blocks.1.attention.query_norm.scale.value" in shared


def test_modules_are_created_once_for_each_architecture(monkeypatch):
    """The checks of a study with hundreds of runs took minutes."""
    created = []
    create = nnx.eval_shape
    monkeypatch.setattr(nnx, "eval_shape", lambda f: created.append(f) or create(f))
    source = config("softmax", norm_epsilon=0.25)  # of this test alone
    counts = []
    for _ in range(2):
        new_parameters(linear_layers(source, "log:features=hedgehog"), replace(source))
        counts.append(len(created))
    assert counts[0] == counts[1] > 0


def test_layers_that_lose_their_positions_are_named():
    source = config("softmax")  # rotary in this block
    for mechanism, lost in (("taylor", {"taylor"}), ("log_window", set())):
        assert layers_without_positions(linear_layers(source, mechanism, ["0"]), source) == lost
    assert not layers_without_positions(config("taylor"), config("linear"))


def test_parameters_without_a_place_are_named():
    options = {"use_bias": True, "output_bias": False}
    source = config(Layers("softmax", options=options), qk_norm=True)
    parts = {"project.bias", "query_norm.scale", "key_norm.scale"}
    unused = {f"blocks.0.attention.{part}.value" for part in parts}
    for keep in ([], ["0"]):  # of some layers, or of all
        assert unused_parameters(linear_layers(source, "gla", keep), source) == unused
    assert not unused_parameters(linear_layers(source, "log_window"), source)
    assert not unused_parameters(source, source)


@pytest.mark.parametrize("block", ["paper", "standard", "decay", "llama"])
def test_defaults_of_the_block_equal_the_same_values(block):
    plain = replace(config("softmax"), block=block)
    assert plain.resolved != plain
    assert new_parameters(plain.resolved, plain) == frozenset()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 2}, "model.num_layers=2 differs from 4 of the model with the weights"),
        ({"num_heads": 4}, "model.num_heads=4 differs from 2 of the model with the weights"),
        (
            {"norm_epsilon": 0.1},
            "model.norm_epsilon=0.1 .* make them equal",
        ),
        ({"tie_embeddings": False}, "model.tie_embeddings=False differs from True"),
    ],
)
def test_models_that_differ_elsewhere_are_refused(changed, said):
    with pytest.raises(UserError, match=said):
        shared_weights(replace(config("log"), **changed), model("softmax"))
