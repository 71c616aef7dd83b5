"""The published model: against results of the original, and its properties on new inputs."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.interop.torch import from_state_dict, to_state_dict
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers, flops_per_token
from heinsen_jax.objectives.objective import next_token
from tests.models.small import apply, random_model

SCAN = Layers("log", options={"implementation": "scan"})  # compiles faster
SIZES = {"vocab_size": 17, "model_dim": 12, "num_layers": 3, "num_heads": 2}
SMALL = LanguageModelConfig(**SIZES, attention=SCAN)


@pytest.fixture
def case(x64, golden):
    return golden("glm_sym")


@pytest.fixture
def original(case) -> LanguageModel:
    arrays = {name[6:]: x for name, x in case.items() if name.startswith("param/")}
    return from_state_dict(arrays, num_heads=int(case["config"][3]))


def parameter_count(config: LanguageModelConfig) -> dict[str, int]:
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    return {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}


def test_flops_count_matrix_products_states_and_half_the_pairs():
    sizes = {"model_dim": 64, "num_layers": 4, "num_heads": 4}
    config = LanguageModelConfig(**sizes)
    assert flops_per_token(config, 1000, 512) == 6 * 1000 + 4 * 4 * 12 * 16 * 16
    config = LanguageModelConfig(**sizes, attention="softmax")
    pairs = sum(range(1, 513)) / 512
    assert flops_per_token(config, 1000, 512) == 6 * 1000 + 4 * 4 * 6 * (16 + 16) * pairs
    config = LanguageModelConfig(**sizes, attention=("log", "softmax"), is_causal=False)
    expected = 6 * 1000 + 2 * 4 * (12 * 16 * 16 + 6 * (16 + 16) * 512)
    assert flops_per_token(config, 1000, 512) == expected


def test_flops_are_unknown_if_a_mechanism_does_not_count_them():
    config = LanguageModelConfig(
        model_dim=64, num_layers=4, num_heads=4, attention=("log", "longformer")
    )
    assert flops_per_token(config, 1000, 512) is None


def test_default_has_the_published_number_of_parameters():
    assert sum(parameter_count(LanguageModelConfig()).values()) == 124_879_872


def test_gpt2_vocabulary_gives_the_papers_count():
    config = LanguageModelConfig(vocab_size=50257)
    assert sum(parameter_count(config).values()) == 124_843_776


def test_input_and_output_embeddings_share_one_leaf():
    names = parameter_count(SMALL)
    assert [name for name in names if "embedding" in name] == ["['embed']['embedding'].value"]


def test_state_has_the_published_size():
    model = nnx.eval_shape(lambda: LanguageModel(LanguageModelConfig(), rngs=nnx.Rngs(0)))
    state = jax.eval_shape(lambda: model.init_state(()))
    assert sum(x.size for x in jax.tree.leaves(state)) == 609_024


def test_logits_loss_and_gradients_equal_the_originals(original, case, golden):
    expected = golden("glm_sym_grads")
    tokens = jnp.asarray(case["token_ids"])
    graph, parameters = nnx.split(original)

    def loss(parameters):
        logits = nnx.merge(graph, parameters)(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.mean(losses), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    np.testing.assert_allclose(logits, case["logits"], atol=1e-10, rtol=0)
    assert float(value) == pytest.approx(float(case["loss"]), abs=1e-12)
    for name, ours in to_state_dict(nnx.merge(graph, gradients)).items():
        np.testing.assert_allclose(ours, expected[f"grad/{name}"], atol=1e-10, rtol=0, err_msg=name)


@pytest.mark.parametrize("size", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_streamed_logits_and_states_equal_the_originals(original, case, size):
    tokens, logits = jnp.asarray(case["token_ids"]), []
    state = original.init_state(tokens.shape[:1])
    for start in range(0, tokens.shape[1], size):
        part, state = apply(original, tokens[:, start : start + size], state, return_state=True)
        logits.append(part)
    np.testing.assert_allclose(
        np.concatenate(logits, 1), case[f"stream{size}/logits"], atol=1e-10, rtol=0
    )
    position = case["stream/state/embed_pos"].reshape(state.position.shape)
    np.testing.assert_allclose(state.position, position, atol=1e-10, rtol=0)
    for layer in range(int(case["config"][2])):
        ours = state.blocks[layer].attention
        for have, theirs in ((ours.log_s, "H_S"), (ours.log_z, "H_Z")):
            expected = case[f"stream/state/layer{layer}/{theirs}"].reshape(have.shape)
            np.testing.assert_allclose(have, expected, atol=1e-10, rtol=0)


class Given:
    """Replacement of the embedding: vectors to differentiate by, and the same output matrix."""

    def __init__(self, vectors, embedding):
        self.vectors, self.embedding = vectors, embedding

    def __call__(self, tokens):
        return self.vectors


def test_logits_do_not_depend_on_later_tokens():
    model = random_model(SMALL)
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, 17)
    vectors, embedding = model.embed(tokens), model.embed.embedding

    def earlier_logits(vectors):
        given = nnx.clone(model)
        given.embed = nnx.static(Given(vectors, embedding))
        weights = jnp.cos(jnp.arange(4 * 17)).reshape(1, 4, 17)
        return jnp.sum(given(tokens)[:, :4] * weights)

    gradient = jax.jit(jax.grad(earlier_logits))(vectors)
    assert float(jnp.abs(gradient[:, :4]).min()) > 0
    assert float(jnp.abs(gradient[:, 4:]).max()) == 0


def test_initial_weights_are_those_of_torch_layers():
    config = LanguageModelConfig(vocab_size=300, model_dim=64, num_layers=4, num_heads=4)
    model = LanguageModel(config, rngs=nnx.Rngs(1))
    attention = model.blocks[0].attention
    for layer, fan_in in (
        (attention.project, 64),
        (attention.gate, 64),
        (model.position.dense, 64),
    ):
        for x in (layer.kernel[...], layer.bias[...]):
            assert 0.9 < float(jnp.abs(x).max()) * fan_in**0.5 <= 1
            assert abs(float(jnp.mean(x))) < 0.02
    assert 0.9 < float(jnp.abs(model.embed.embedding[...]).max()) * 64**0.5 <= 1
    kernels = attention.project.kernel[...]
    assert not jnp.allclose(kernels[0], kernels[1]), "layers must not share their weights"


def test_compiled_size_does_not_grow_with_depth():
    def size(num_layers: int) -> int:
        config = LanguageModelConfig(
            vocab_size=17, model_dim=12, num_layers=num_layers, num_heads=2
        )
        graph, parameters = nnx.split(random_model(config))
        call = jax.jit(lambda p, t: nnx.merge(graph, p)(t))
        return len(call.lower(parameters, jnp.zeros((1, 8), jnp.int32)).as_text())

    assert size(12) < 1.02 * size(3)


@cache
def gradient(**fields) -> list[np.ndarray]:
    """Return the gradients of a small model, compiled."""
    config = LanguageModelConfig(**SIZES | {"num_layers": 2}, attention=SCAN, **fields)
    graph, parameters = nnx.split(random_model(config))
    tokens = jnp.arange(10)[None] % 17

    def loss(parameters):
        return jnp.sum(jnp.sin(nnx.merge(graph, parameters)(tokens)))

    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(parameters))]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "policy",
    [
        "dots_with_no_batch_dims_saveable",
        pytest.param("nothing_saveable", marks=pytest.mark.nightly),
    ],
)
def test_remat_gives_the_same_gradients(policy):
    for ours, theirs in zip(gradient(remat=True, remat_policy=policy), gradient(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.nightly
def test_bfloat16_is_close_and_keeps_float32_states():
    config = LanguageModelConfig(**SIZES, attention=SCAN, dtype="bfloat16")
    initial = jax.jit(lambda: nnx.state(LanguageModel(SMALL, rngs=nnx.Rngs(0))))()
    exact, rounded = (nnx.merge(nnx.graphdef(random_model(x)), initial) for x in (SMALL, config))
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 17)
    logits, state = apply(rounded, tokens, return_state=True)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, apply(exact, tokens), atol=0.05, rtol=0)


@pytest.mark.parametrize("block", ["paper", "standard", "decay", "llama", "fastformer"])
def test_strict_promotion(block):
    """Dtypes are converted explicitly, also in gradients of the loss."""
    attention = "additive" if block == "fastformer" else SCAN
    config = LanguageModelConfig(**SIZES, attention=attention, block=block, dtype="bfloat16")
    batch = Batch(np.zeros((2, 9), np.int32), np.ones((2, 8), bool))

    def loss(model: LanguageModel) -> jax.Array:
        return next_token(model, batch, jax.random.key(0)).sums()[0]

    with jax.numpy_dtype_promotion("strict"):
        shapes = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
        nnx.eval_shape(nnx.grad(loss), shapes)


@pytest.mark.parametrize("token", [-1, 17])
def test_a_token_outside_the_vocabulary_is_refused(token):
    model = random_model(SMALL)
    with pytest.raises(ValueError, match=f"token id {token} is outside .* vocabulary of 17"):
        model(jnp.array([[1, token]]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 5, "num_heads=5 does not divide model_dim=768"),
        ("attention", "sofmax", "attention mechanism 'sofmax': unknown; choose one of "),
        ("num_layers", 0, "greater than 0"),
        ("num_layer", 3, "num_layer"),
        ("dtype", "float8", "float32"),
    ],
)
def test_bad_configurations_are_refused_with_the_field_named(field, value, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        LanguageModelConfig(**{field: value})


@pytest.mark.parametrize("attention", ["softmax", ("log", "softmax")])
def test_tokens_beyond_the_capacity_of_a_state_are_refused(attention):
    model = random_model(replace(SMALL, attention=attention, num_layers=2))
    tokens, state = jnp.ones((1, 3), int), model.init_state((1,), capacity=4)
    _, state = model(tokens, state=state, return_state=True)
    with pytest.raises(ValueError, match="capacity of 4 tokens is less than 6"):
        model(tokens, state=state)
