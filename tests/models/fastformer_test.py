"""The Fastformer language model against the published one."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from heinsen_jax.config import load_config
from heinsen_jax.generate import Engine, generate, stream
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from tests.models.small import apply, random_model

LAYERS = 3
DENSE = {"Wquery": "query", "Wkeys": "key", "Wvalues": "value", "attn_proj": "project"}


def config(*windows: int, **changes) -> LanguageModelConfig:
    """Return a small model with these windows in its first layers."""
    layers = [Layers("additive", options={"window_size": size}) for size in windows]
    fields = {
        "vocab_size": 37,
        "model_dim": 16,
        "num_heads": 4,
        "num_layers": LAYERS,
        "attention": (*layers, "additive"),
        "block": "fastformer",
        "embedding_style": "fastformer",
        "max_length": 32,
    }
    return LanguageModelConfig(**fields | changes)


def named(model: LanguageModel) -> Iterator[tuple[str, nnx.Param, int | None, bool]]:
    """Yield published names, parameters, their layer, and whether they are transposed."""
    yield "word_embedding.weight", model.embed.embedding, None, False
    yield "proj_logits.bias", model.bias, None, False
    yield "fastformer_model.position_embeddings.weight", model.position.embedding, None, False
    norms = [("fastformer_model.LayerNorm", model.position.norm, None)]
    for i in range(LAYERS):
        turn, layer = i % len(model.blocks), i // len(model.blocks)
        block, prefix = model.blocks[turn], f"fastformer_model.decoders.{i}"
        attention = block.attention
        yield f"{prefix}.attention.query_attn", attention.query_weights, layer, False
        yield f"{prefix}.attention.key_attn", attention.key_weights, layer, False
        for name, ours in DENSE.items():
            yield f"{prefix}.attention.{name}.weight", getattr(attention, ours).kernel, layer, True
        yield f"{prefix}.boom.weight", block.mlp.up.kernel, layer, True
        yield f"{prefix}.unboom.weight", block.mlp.down.kernel, layer, True
        norms.append((f"{prefix}.attention.attn_norm", block.norm, layer))
        norms.append((f"{prefix}.attention.mid_norm", attention.norm, layer))
        norms.append((f"{prefix}.boom_norm", block.mlp_norm, layer))
    for name, norm, layer in norms:
        yield f"{name}.weight", norm.scale, layer, False
        yield f"{name}.bias", norm.bias, layer, False


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "windows"),
    [  # with windows, too, the last layer is global
        pytest.param("global", (), marks=pytest.mark.nightly),
        ("window", (4, 8)),
    ],
)
def test_published_model(golden, name, windows):
    case = golden(f"additive_lm_{name}")
    types = {"dtype": "float64", "param_dtype": "float64"}
    model = nnx.clone(random_model(config(*windows, **types)))
    known = {key.removeprefix("param/") for key in case if key.startswith("param/")}
    assert known == {published for published, *_ in named(model)}
    for published, parameter, layer, is_turned in named(model):
        value = case[f"param/{published}"]
        value = value.T if is_turned else value
        if layer is not None:
            layers = np.array(parameter[...])
            layers[layer] = value
            value = layers
        parameter[...] = jnp.asarray(value)
    graph, parameters = nnx.split(model)
    tokens = jnp.asarray(case["token_ids"])

    @jax.jit
    def loss_and_gradients(parameters):
        def loss(parameters):
            logits = nnx.merge(graph, parameters)(tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return losses.mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    (loss, logits), gradients = loss_and_gradients(parameters)
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=1e-10)
    assert float(loss) == pytest.approx(float(case["loss"]), abs=1e-12)
    for published, gradient, layer, is_turned in named(nnx.merge(graph, gradients)):
        have, want = np.asarray(gradient[...]), case[f"grad/{published}"]
        have = have if layer is None else have[layer]
        have = have.T if is_turned else have
        if published == "word_embedding.weight":  # the published code treats token 0 as padding
            have, want = have[1:], want[1:]
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-10)


def test_the_shipped_model_is_of_the_published_size():
    model = load_config("configs/fastformer_lm.py").model
    windows = [getattr(x, "window_size", None) for x in model.mechanisms()]
    assert windows == [4, 8, 16, 32, 64, None]
    shapes = nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
    assert count - (50304 - 32100) * (128 + 1) == 5_589_092


def test_chunks_equal_one_pass_up_to_the_last_position():
    model = random_model(config(4, num_layers=2))
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, 37)
    start = model.init_state((2,))
    whole, state = apply(model, tokens, start, return_state=True)
    parts, chunks = [], start
    for chunk in np.split(tokens, [1, 31], axis=1):
        logits, chunks = apply(model, chunk, chunks, return_state=True)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    assert state.position == chunks.position == model.config.max_length
    with pytest.raises(ValueError, match="sequence length 33 exceeds max_length=32"):
        model(tokens[:, :1], state=state)
    with pytest.raises(ValueError, match="sequence length 33 exceeds max_length=32"):
        model(jnp.zeros((1, 33), int))
    after, _ = apply(model, tokens[:, :1], state, return_state=True)
    assert np.all(np.isnan(after))


def test_generation_ends_with_the_positions():
    model = random_model(config())
    prompt = jnp.arange(1)
    new, state = generate(model, prompt, 32, top_k=1, return_state=True)
    assert new.shape == (32,)
    assert Engine(model).remaining(state) == 0
    with pytest.raises(ValueError, match="33 more tokens, but the model has 32 positions"):
        generate(model, prompt, 33, top_k=1)
    with pytest.raises(ValueError, match=r"has reached model\.max_length"):
        for _ in stream(model, prompt, top_k=1):
            pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": None}, "max_length=None with positions='learned'"),
        ({"embedding_style": "paper"}, "max_length=32"),
    ],
)
def test_max_length_requires_learned_positions(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
