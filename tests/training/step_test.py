"""One update: what it computes, and that parts add up to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.models import LanguageModel
from heinsen_jax.sharding import MeshConfig, make_mesh
from heinsen_jax.training.objective import next_token
from heinsen_jax.training.optimizer import OptimizerConfig, make_optimizer
from heinsen_jax.training.state import abstract_state, graph_of, init_sharded, initializer
from heinsen_jax.training.step import make_evaluation_step, make_train_step


def everything(tokens):
    return Batch(tokens, jnp.ones(tokens[:, 1:].shape, bool))


@pytest.fixture(scope="module")
def parts(small):
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
    init = initializer(small.model, optimizer, seed=0)
    abstract = abstract_state(init, make_mesh(MeshConfig()))
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    graph = graph_of(small.model)

    def run(batch, accumulation_steps):
        step = make_train_step(
            graph, optimizer, accumulation_steps=accumulation_steps, out_shardings=shardings
        )
        return step(init_sharded(init, abstract), batch)

    return run, graph, init


def test_accumulated_parts_equal_the_whole_batch(parts):
    """Also where of each row another number of tokens counts."""
    run, _, _ = parts
    tokens = jax.random.randint(jax.random.key(0), (8, 17), 0, 256)
    batch = Batch(tokens, jnp.arange(16)[None] < jnp.arange(1, 17, 2)[:, None])
    whole, metrics = run(batch, 1)
    summed, same_metrics = run(batch, 4)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-3)
    for name in metrics:
        assert float(metrics[name]) == pytest.approx(float(same_metrics[name]), rel=1e-5)


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(parts):
    run, _, init = parts
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    _, metrics = run(everything(tokens), 1)
    state = init()
    logits = nnx.merge(parts[1], state.parameters)(tokens[:, :-1])
    probabilities = np.asarray(jax.nn.softmax(logits), np.float64)
    picked = np.take_along_axis(probabilities, np.asarray(tokens[:, 1:, None]), -1)
    assert float(metrics["loss"]) == pytest.approx(float(-np.log(picked).mean()), rel=1e-5)


def test_evaluation_counts_masked_tokens_only(parts):
    _, graph, init = parts
    parameters = init().parameters
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    mask = jnp.arange(8)[None] < jnp.array([[8], [3]])
    logits = nnx.merge(graph, parameters)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    total, correct, count = make_evaluation_step(graph)(parameters, Batch(tokens, mask), 0)
    assert int(count) == 8 + 3
    right = np.asarray(jnp.argmax(logits, -1) == tokens[:, 1:])
    assert int(correct) == right[0].sum() + right[1, :3].sum()
    assert float(total) == pytest.approx(float(losses[0].sum() + losses[1, :3].sum()), rel=1e-5)


@pytest.mark.parametrize("factor", [jnp.nan, jnp.inf, 1e6])
def test_a_harmful_update_changes_nothing_and_is_counted(small, factor):
    """Batches that begin with token 1 give logits, and so gradients, times the factor."""

    def objective(model, tokens, there, key):
        said = next_token(model, tokens, there, key)
        return said._replace(features=said.features * jnp.where(tokens[0, 0] == 1, factor, 1.0))

    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
    init = initializer(small.model, optimizer, seed=0)
    abstract = abstract_state(init, make_mesh(MeshConfig()))
    step = make_train_step(
        graph_of(small.model),
        optimizer,
        accumulation_steps=1,
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
        objective=objective,
        skip_above=20.0,
    )
    good = jax.random.randint(jax.random.key(0), (8, 17), 2, 256)
    harmful = good.at[0, 0].set(1)

    def leaves(state):
        return [x.tobytes() for x in jax.tree.leaves((state.parameters, state.optimizer))]

    state = init_sharded(init, abstract)
    counts = []
    for tokens in (good, harmful, harmful, good):
        before, usual = leaves(state), float(state.guard.usual_norm)
        state, metrics = step(state, everything(tokens))
        assert (leaves(state) == before) == (tokens is harmful)
        assert (float(state.guard.usual_norm) == usual) == (tokens is harmful)
        counts.append((int(metrics["skipped"]), int(metrics["skipped_in_a_row"])))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0)]
    assert int(state.step) == 4


def test_initial_weights_follow_from_the_seed(small):
    a, b, c = (
        nnx.state(LanguageModel(small.model, rngs=nnx.Rngs(seed)))["embed"]["embedding"][...]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(a, b)
    assert not jnp.array_equal(a, c)
