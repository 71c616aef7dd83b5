"""The language model with every mechanism: it learns, and if causal, streams and generates."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.data import Batch
from heinsen_jax.generate import generate, stream
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from heinsen_jax.objectives.objective import MaskedTokens
from tests.models.small import apply, assert_greedy, random_model

CAPABILITIES = {name: attention.mechanism(name).capabilities for name in attention.names()}
CAUSAL = [name for name, can in CAPABILITIES.items() if can.causal]


def few_or_nightly(names: Sequence[str], few: Sequence[str]) -> Any:
    """Run a test for some mechanisms, and nightly for all."""
    params = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in few)) for name in names]
    return pytest.mark.parametrize("name", params)


SMALL = {
    "log": {"implementation": "scan"},
    "tglobal": {"capacity": 8},
    "memory_compressed": {"capacity": 8},
}
"""Options of some mechanisms, besides those for short sequences, that compile faster."""


def configured(*pattern: str, options: dict | None = None, **fields: Any) -> LanguageModelConfig:
    """Return a small model with these mechanisms; options are those of all of them."""

    def layers(name: str) -> Layers:
        short = attention.mechanism(name).short_options(20) | SMALL.get(name, {})
        return Layers(name, options=short | (options or {}))

    sizes = {"vocab_size": 17, "model_dim": 12, "num_heads": 2, "num_layers": 2 * len(pattern)}
    return LanguageModelConfig(attention=tuple(map(layers, pattern)), **sizes | fields)


def build(*pattern: str, **fields: Any) -> LanguageModel:
    return random_model(configured(*pattern, **fields))


@few_or_nightly(attention.names(), few=["softmax", "mamba2", "log"])
def test_parameters_in_bfloat16_are_those_of_float32_rounded(name):
    """Activations are in float32, so that nothing else is rounded; with one layer of the paper's
    positions."""
    causal = {"is_causal": CAPABILITIES[name].causal}
    fields = {"block": "standard", "num_layers": 1, "tie_embeddings": False} | causal
    small = build(name, param_dtype="bfloat16", **fields)
    dtypes = {x.dtype.name for x in jax.tree.leaves(nnx.state(small, nnx.Param))}
    assert dtypes == {"bfloat16", "float32"}
    graph, other = nnx.split(build(name, **fields))
    same = jax.tree.map(lambda x, y: x.astype(y.dtype), nnx.state(small, nnx.Param), other)
    tokens = np.random.default_rng(0).integers(0, 17, (2, 20))
    ours = apply(small, tokens)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, apply(nnx.merge(graph, same), tokens), rtol=0, atol=1e-6)


@pytest.mark.nightly
@few_or_nightly(["log", "gqa", "linformer", "l1", "colt5"], few=["gqa"])
def test_it_learns_to_predict_masked_tokens(name):
    """Sequences with period 6: 60 updates reduce the loss from log 18 to below 1.7. A unigram model
    has 1.56."""
    config = configured(name, block="standard", is_causal=False, vocab_size=18, num_layers=1)
    initial = jax.jit(lambda: nnx.state(LanguageModel(config, rngs=nnx.Rngs(0))))
    graph, parameters = nnx.graphdef(random_model(config)), initial()
    pattern = jnp.asarray([3, 1, 4, 1, 5, 9])
    tokens = jnp.stack([jnp.tile(jnp.roll(pattern, i % 6), 6)[:33] for i in range(24)])
    batch = Batch(tokens, jnp.ones((24, 32), bool))
    objective = MaskedTokens(fraction=0.15, num_tokens=17)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(parameters, state, key):
        def loss(parameters):
            said = objective(nnx.merge(graph, parameters), batch, key)
            return said.sums()[0] / jnp.sum(said.loss_mask)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    losses = []
    for key in jax.random.split(jax.random.key(0), 60):
        parameters, state, value = update(parameters, state, key)
        losses.append(float(value))
    assert losses[0] == pytest.approx(np.log(18), abs=0.7)
    assert np.mean(losses[-5:]) < 1.7


@few_or_nightly(CAUSAL, few=["sliding_window"])  # others: tests/generate/prompts_test.py
def test_greedy_equals_recomputing_everything(name):
    model = build(name)
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert_greedy(model, tokens, generate(model, tokens, 9, top_k=1))


@pytest.mark.nightly
def test_a_cache_grows(monkeypatch):
    """In a stream, after `generate`, and after a state without spare capacity."""
    monkeypatch.setattr("heinsen_jax.generate.tokens.MORE_TOKENS", 3)
    model = build("softmax")
    prompt = jnp.array([3, 1, 4])
    streamed = [token for token, _ in zip(stream(model, prompt, top_k=1), range(10), strict=False)]
    assert_greedy(model, prompt[None], np.array([streamed]))
    first, state = generate(model, prompt, 4, top_k=1, return_state=True)
    np.testing.assert_array_equal(first, streamed[:4])
    second = generate(model, first[-1:], 6, top_k=1, state=state)
    np.testing.assert_array_equal(second, streamed[4:])
    _, grown = apply(model, prompt, return_state=True)
    _, grown = apply(model, first[:3], grown, return_state=True)
    second = generate(model, first[-1:], 6, top_k=1, state=grown)
    np.testing.assert_array_equal(second, streamed[4:])


@pytest.mark.parametrize(
    ("block", "remat"),
    [("paper", False), pytest.param("standard", True, marks=pytest.mark.nightly)],
)
def test_layers_follow_the_pattern(block, remat):
    """Compare with layers applied by hand."""
    pattern = ("log", "softmax")
    model = build(*pattern, block=block, remat=remat)
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    first = jax.jit(lambda: model.position(model.embed(tokens), state=jnp.zeros((1, 12)))[0])
    last = jax.jit(lambda x: model.norm(x) @ model.embed.embedding[...].T)
    x = first()
    apply_block = jax.jit(
        lambda graph, parameters, x: nnx.merge(graph, parameters)(
            x, state=None, return_state=False
        )[0],
        static_argnums=0,
    )
    for layer in range(4):
        graph, parameters = nnx.split(model.blocks[layer % 2])
        parameters = jax.tree.map(lambda x, n=layer // 2: np.asarray(x)[n], parameters)
        block_ = nnx.merge(graph, parameters)
        assert type(block_.attention) is attention.mechanism(pattern[layer % 2])
        assert hasattr(block_.attention, "gate") == (block == "paper")
        x = apply_block(graph, parameters, x)
    expected = last(x)
    np.testing.assert_allclose(apply(model, tokens), expected, atol=2e-5)
    parts, state = [], model.init_state((1,), capacity=10)
    for chunk in np.split(tokens, 2, axis=1):
        logits, state = apply(model, chunk, state, return_state=True)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "nope"}, "attention mechanism 'nope': unknown; choose one of "),
        ({"attention": ()}, "must name at least one mechanism"),
        (
            {"attention": "linformer"},
            "'linformer' is not causal.* is_causal=False to train on masked",
        ),
        ({"attention": "rmt", "is_causal": False}, "'rmt', as configured, is causal only"),
        ({"attention": "additive", "key_depth": 8}, "key_depth"),
        ({"attention": ("log", "softmax"), "num_layers": 3}, "num_layers=3 is not a multiple of"),
    ],
)
def test_invalid_arguments_raise(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        LanguageModelConfig(**{"num_layers": 2} | fields)
