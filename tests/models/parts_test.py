"""Parts of blocks around attention: convolutions, positions, and their states."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from flax import nnx

from heinsen_jax.attention.convolution import CausalConvolution
from heinsen_jax.generate import generate
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from tests.models.small import apply, assert_greedy, random_model

SCAN = Layers("log", options={"implementation": "scan"})  # compiles faster
PARAMETERS = {"dtype": None, "param_dtype": jnp.float32}


def model(**fields) -> LanguageModel:
    sizes = {"vocab_size": 17, "model_dim": 12, "num_heads": 2, "num_layers": 2}
    config = LanguageModelConfig(**{"attention": SCAN, **sizes, **fields})
    return random_model(config)


@pytest.mark.parametrize("size", [1, 4])
def test_a_convolution_is_the_sum_of_weighted_earlier_tokens(size):
    layer = CausalConvolution(size, 5, "embed", **PARAMETERS, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 9, 5)))
    y, last = layer(jnp.asarray(x), state=None)
    taps, expected = np.asarray(layer.taps[...]), np.zeros_like(x)
    for t in range(9):
        for back in range(min(size, t + 1)):
            expected[:, t] += taps[size - 1 - back] * x[:, t - back]
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_array_equal(last, x[:, 9 - (size - 1) :])
    assert np.all(taps[-1] == 1)
    assert size == 1 or 0 < np.abs(taps[:-1]).max() <= 1 / size


VARIANTS = {
    "as in the paper": {},
    "convolution": {"convolution_size": 4},
    "convolution, standard block": {"convolution_size": 3, "block": "standard"},
    "no positions": {"positions": "none", "convolution_size": 2},
    "learned positions": {"positions": "learned", "max_length": 40, "attention": "softmax"},
    "decay": {
        "block": "decay",
        "attention": ("log", Layers("sliding_window", options={"window_size": 7})),
    },
    "rotary": {
        "positions": "none",
        "attention": Layers("softmax", options={"positions": "rotary"}),
    },
}


def variants(*nightly: str):
    return pytest.mark.parametrize(
        "fields",
        [
            pytest.param(fields, id=name, marks=[pytest.mark.nightly] * (name in nightly))
            for name, fields in VARIANTS.items()
        ],
    )


@variants("no positions", "convolution, standard block", "as in the paper")
def test_any_chunks_give_the_logits_of_one_pass(fields):
    ours = model(**fields)
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 17)
    start = ours.init_state((2,), capacity=30)
    whole, end = apply(ours, tokens, start, return_state=True)
    chunks, state = [], start
    for chunk in np.split(tokens, 2, axis=1):
        logits, state = apply(ours, chunk, state, return_state=True)
        chunks.append(logits)
    np.testing.assert_allclose(np.concatenate(chunks, 1), whole, atol=3e-5)
    for have, want in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        have, want = (np.exp(x).real if np.iscomplexobj(x) else x for x in (have, want))
        np.testing.assert_allclose(have, want, atol=3e-5, rtol=1e-4)
    changed, _ = apply(ours, tokens.at[:, 20:].set(3), start, return_state=True)
    np.testing.assert_allclose(changed[:, :20], whole[:, :20], atol=3e-5)


@pytest.mark.nightly
@variants()
def test_greedy_decoding_equals_recomputing_everything(fields):
    """Nightly: the short suite has tests/generate/prompts_test.py."""
    ours = model(**fields)
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert_greedy(ours, tokens, generate(ours, tokens, 9, top_k=1))


def test_convolutions_distinguish_the_order_of_tokens():
    """A layer of softmax attention is permutation invariant; a convolution of three tokens before
    it is not."""
    tokens = jnp.array([[3, 1, 4, 1, 5, 9]])
    other = tokens[:, jnp.array([2, 0, 1, 4, 3, 5])]
    fields = {"attention": "softmax", "positions": "none", "num_layers": 1}
    alike, apart = model(**fields), model(**fields, convolution_size=3)
    both = jnp.concatenate([tokens, other])
    one, reordered = np.asarray(apply(alike, both)[:, -1])
    np.testing.assert_allclose(one, reordered, atol=1e-5)
    one, reordered = np.asarray(apply(apart, both)[:, -1])
    assert np.abs(one - reordered).max() > 1e-2


def test_the_state_of_a_convolution_is_its_last_inputs():
    ours = model(convolution_size=4, block="standard")
    plain = model(block="standard")
    more = ours.state_size(100) - plain.state_size(100)
    assert more == 2 * 2 * 3 * 12 * 4  # layers, branches, tokens, features, bytes
    assert ours.state_size(10) == ours.state_size(10**6)


def test_the_decay_block_is_a_standard_block_of_these_parts():
    said = {"positions": "none", "convolution_size": 4, "block": "standard"}
    log = Layers("log", options={"values": "linear", "decay": "head"})
    window = {"window_size": 7}
    rotary = Layers("sliding_window", options={**window, "positions": "rotary"})
    ours = model(block="decay", attention=("log", Layers("sliding_window", options=window)))
    parts = model(attention=(log, rotary), **said)
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 17)
    np.testing.assert_array_equal(apply(ours, tokens), apply(parts, tokens))
    assert ours.blocks[0].attention.config.decay == "head"
    assert ours.blocks[0].attention.config.values == "linear"
    assert ours.blocks[1].attention.config.positions == "rotary"
    assert model(block="decay", convolution_size=2).config.convolution == 2


@pytest.mark.parametrize(
    "style",
    [
        {"block": "llama"},
        {"norm": "rms", "mlp": "gelu"},
        {"norm": "zero_centered_rms", "mlp": "gelu"},
        {"norm": "rms", "mlp": "gelu_tanh", "norm_epsilon": 0.1},
        {"norm": "rms", "mlp": "squared_relu", "mlp_multiplier": 0.3},
        {"norm": "rms", "mlp": "geglu_tanh", "mlp_gate_multiplier": 0.7, "mlp_multiplier": 0.3},
    ],
)
def test_norm_and_mlp_follow_their_formulas(x64, style):
    """One layer, its attention removed by a projection of zeros."""
    fields = {"num_layers": 1, "block": "standard", "positions": "none", "tie_embeddings": False}
    dtypes = {"dtype": "float64", "param_dtype": "float64"}
    ours = nnx.clone(model(**fields | style | dtypes, logit_soft_cap=2.0))
    block = jax.tree.map(lambda x: x[0], nnx.state(ours.blocks[0]))
    weights = nnx.to_pure_dict(block)
    has_bias = "bias" in weights["mlp"]["up"]
    assert has_bias == ("block" not in style) == ("bias" in weights["attention"]["output"])
    for name in weights["attention"]["output"]:
        parameter = getattr(ours.blocks[0].attention.output, name)
        parameter[...] = 0 * parameter[...]

    epsilon = style.get("norm_epsilon", 1e-6)

    def rms(x, scale):
        scale = np.asarray(scale) + (style.get("norm") == "zero_centered_rms")
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * scale

    def dense(name, x):
        w = {k: np.asarray(v) for k, v in weights["mlp"][name].items()}
        return x @ w["kernel"] + w.get("bias", 0)

    tokens = np.array([[3, 1, 4, 1, 5, 9]])
    x = np.asarray(ours.embed.embedding[...])[tokens]
    h = rms(x, weights["mlp_norm"]["scale"])
    if style.get("mlp") == "squared_relu":
        wide = np.maximum(dense("up", h), 0) ** 2
    elif style.get("mlp") == "geglu_tanh":
        wide = np.asarray(jax.nn.gelu(0.7 * dense("gate", h))) * dense("up", h)
    elif has_bias:
        is_tanh = style["mlp"] == "gelu_tanh"
        wide = np.asarray(jax.nn.gelu(dense("up", h), approximate=is_tanh))
    else:
        gate = dense("gate", h)
        wide = gate / (1 + np.exp(-gate)) * dense("up", h)
    x = rms(x + style.get("mlp_multiplier", 1) * dense("down", wide), ours.norm.scale[...])
    logits = x @ np.asarray(ours.unembed.embedding[...]).T
    np.testing.assert_allclose(ours(tokens), 2 * np.tanh(logits / 2), rtol=1e-10)


def test_parallel_branches_have_the_same_input():
    fields = {"num_layers": 1, "block": "standard", "positions": "none", "attention": "softmax"}
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, 17)
    ours = nnx.clone(model(**fields, parallel_branches=True))
    both = np.asarray(ours.features(tokens)[0])
    assert np.abs(both - model(**fields).features(tokens)[0]).max() > 1e-2
    ours.norm = lambda x: x  # of the sum of branches
    embedded, both = ours.embed(tokens), ours.features(tokens)[0]
    alone = []
    for part in ("attention.output", "mlp.down"):
        copy = nnx.clone(ours)
        layer, name = part.split(".")
        other = getattr(getattr(copy.blocks[0], layer), name)
        other.kernel[...], other.bias[...] = 0 * other.kernel[...], 0 * other.bias[...]
        alone.append(copy.features(tokens)[0] - embedded)
    np.testing.assert_allclose(both - embedded, sum(alone), atol=1e-5)


def test_multipliers_scale_embeddings_branches_and_logits():
    fields = {"block": "llama", "attention": "softmax", "num_layers": 1, "tie_embeddings": False}
    tokens = np.array([[3, 1, 4, 1, 5]])
    plain = nnx.clone(model(**fields))
    multipliers = {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "logit_divisor": 8.0}
    ours = model(**fields, **multipliers)
    embed, block = plain.embed.embedding, plain.blocks[0]
    embed[...] = 4 * embed[...]
    for kernel in (block.attention.output.kernel, block.mlp.down.kernel):
        kernel[...] = kernel[...] / 2
    np.testing.assert_allclose(ours(tokens), plain(tokens) / 8, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sliding_window", "dilated", "block_sparse"])
def test_the_scale_of_dot_products_is_an_option(name):
    """The same as queries that are multiplied by it."""
    ours, plain = (
        nnx.clone(model(block="standard", attention=Layers(name, options=x), num_layers=1))
        for x in ({"positions": "rotary", "scale": 0.7}, {"positions": "rotary"})
    )
    attention = plain.blocks[0].attention
    columns = attention.columns()["query"]
    factor = np.ones(attention.project.kernel.shape[-1], np.float32)
    factor[columns] = 0.7 * np.sqrt(attention.key_depth)
    for parameter in (attention.project.kernel, attention.project.bias):
        parameter[...] = np.asarray(parameter[...]) * factor
    tokens = np.array([[3, 1, 4, 1, 5]])
    np.testing.assert_allclose(ours(tokens), plain(tokens), atol=1e-6)


def test_norms_after_attention_and_mlp_follow_their_formula():
    x = jax.random.normal(jax.random.key(0), (1, 9, 12))
    ours = model(block="llama", attention=Layers("softmax", norm_after=True), num_layers=1)
    graph, stacked = nnx.split(ours.blocks[0])
    block = nnx.merge(graph, jax.tree.map(lambda x: x[0], stacked))
    y, _ = block(x, state=None, return_state=False)
    x = x + block.norm(block.attention(x))
    np.testing.assert_allclose(y, x + block.mlp_norm(block.mlp(x)), atol=1e-6)


def test_norms_on_both_sides_follow_their_formula():
    x = jax.random.normal(jax.random.key(0), (1, 9, 12))
    layers = Layers("softmax", norm_after="both")
    ours = model(block="llama", attention=layers, num_layers=1, residual_multiplier=0.5)
    graph, stacked = nnx.split(ours.blocks[0])
    block = nnx.merge(graph, jax.tree.map(lambda x: x[0] + 0.1, stacked))
    y, _ = block(x, state=None, return_state=False)
    x = x + 0.5 * block.output_norms[0](block.attention(block.norm(x)))
    want = x + 0.5 * block.output_norms[1](block.mlp(block.mlp_norm(x)))
    np.testing.assert_allclose(y, want, atol=1e-6)
    alone = model(block="llama", attention=replace(layers, has_mlp=False), num_layers=1)
    assert len(alone.blocks[0].output_norms) == 1


def test_layers_without_an_mlp():
    pattern = Layers("softmax", has_mlp=False), "softmax"
    ours = model(block="llama", attention=pattern, num_layers=2)
    alone, with_mlp = (nnx.state(block, nnx.Param) for block in ours.blocks)
    assert "mlp" not in alone
    assert "mlp_norm" not in alone
    assert "mlp" in with_mlp
    x = jax.random.normal(jax.random.key(0), (1, 9, 12))
    graph, stacked = nnx.split(ours.blocks[0])
    block = nnx.merge(graph, jax.tree.map(lambda x: x[0], stacked))
    y, _ = block(x, state=None, return_state=False)
    np.testing.assert_allclose(y, x + block.attention(block.norm(x)), atol=1e-6)


def test_the_output_projection_has_its_own_bias():
    def paths(**options):
        ours = model(block="standard", attention=Layers("softmax", options=options))
        return str(nnx.to_flat_state(nnx.state(ours.blocks[0].attention, nnx.Param)).paths)

    assert paths().count("bias") == 2
    assert paths(output_bias=False).count("bias") == 1
    assert paths(use_bias=False, output_bias=True).count("bias") == 1
    with pytest.raises(ValueError, match="output_bias with gated=True"):
        paths(gated=True, output_bias=True)


def test_the_llama_block_is_a_standard_block_of_these_parts():
    rotary = Layers("softmax", options={"positions": "rotary"})
    parts = {"norm": "rms", "mlp": "swiglu", "use_bias": False, "positions": "none"}
    ours = model(block="llama", attention="softmax")
    same = model(block="standard", attention=rotary, **parts)
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 17)
    np.testing.assert_array_equal(apply(ours, tokens), apply(same, tokens))
    assert "bias" not in str(nnx.to_flat_state(nnx.state(ours, nnx.Param)).paths)
    normed = model(block="llama", attention="softmax", qk_norm=True)
    assert normed.blocks[0].attention.config.query_key_norm


@pytest.mark.parametrize(
    ("mlp", "fields", "width"),
    [
        ("gelu", {}, 128),
        ("swiglu", {}, 96),
        ("swiglu", {"mlp_dim": 10}, 10),
        ("geglu_tanh", {}, 96),
    ],
)
def test_a_gated_mlp_has_as_many_parameters_as_one_without_a_gate(mlp, fields, width):
    config = LanguageModelConfig(block="standard", model_dim=32, num_heads=2, mlp=mlp, **fields)
    assert config.mlp_width == width


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp": "swiglu", "mlp_dim": 8}, "mlp, mlp_dim with block='paper': that block has no MLP"),
        ({"mlp_multiplier": 0.5}, "mlp_multiplier with block='paper': that block has no MLP"),
        ({"mlp_ratio": 2}, "mlp_ratio with block='paper': that block has no MLP"),
        ({"block": "standard", "mlp_gate_multiplier": 0.5}, "the MLP has no gate; leave it out"),
        ({"qk_norm": True, "attention": "additive"}, "has no option query_key_norm"),
        ({"positions": "learned"}, "max_length=None with positions='learned'"),
        ({"positions": "none", "max_length": 9}, "max_length=9 with positions='none'"),
        ({"max_length": 9}, "max_length=9 with positions='recurrence'"),
        ({"embedding_style": "fastformer"}, "max_length=None with positions='learned'"),
        (
            {"convolution_size": 2, "is_causal": False, "attention": "softmax"},
            "convolution_size with is_causal=False",
        ),
        ({"block": "decay", "is_causal": False}, "block='decay' with is_causal=False"),
        ({"parallel_branches": True}, "parallel_branches: unsupported with block='paper'"),
        (
            {"block": "fastformer", "attention": Layers("softmax", norm_after=True)},
            "norm_after: unsupported with block='fastformer'",
        ),
        (
            {"attention": Layers("softmax", options={"rotary_high_turns": 1.0})},
            r"rotary_high_turns=1\.0 must be above rotary_low_turns=1\.0",
        ),
    ],
)
def test_invalid_arguments_raise(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        LanguageModelConfig(**fields)


def test_rotary_needs_pairs_of_features():
    rotary = Layers("softmax", options={"positions": "rotary"})
    with pytest.raises(
        ValueError, match="key_depth=3: rotary position encodings rotate pairs of features"
    ):
        model(attention=rotary, key_depth=3)
