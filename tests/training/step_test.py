"""Training step: loss, gradient accumulation, skipped updates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.models import LanguageModel
from heinsen_jax.objectives.evaluation import make_evaluation_step
from heinsen_jax.objectives.objective import next_token
from heinsen_jax.sharding import MeshConfig, make_mesh
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.training.guard import Guard
from heinsen_jax.training.optimizer import make_optimizer
from heinsen_jax.training.state import abstract_state, graph_of, init_sharded, initializer
from heinsen_jax.training.step import make_train_step

ROWS, LENGTH = 8, 16
FACTORS = np.array([1.0, jnp.nan, jnp.inf, 1e6], np.float32)


def random_tokens(seed):
    """No token stands for a harmful factor."""
    return jax.random.randint(jax.random.key(seed), (ROWS, LENGTH + 1), len(FACTORS), 256)


def everything(tokens):
    return Batch(tokens, jnp.ones(tokens[:, 1:].shape, bool))


def next_token_or_harm(model, batch, key):
    """Batches that begin with token 1, 2 or 3 give logits, and so gradients, times a factor."""
    said = next_token(model, batch, key)
    first = batch.tokens[0, 0]
    factor = jnp.where(first < len(FACTORS), jnp.asarray(FACTORS)[first % len(FACTORS)], 1.0)
    return said._replace(features=said.features * factor)


class Parts:
    """A model, its initial state, and updates that are compiled once."""

    def __init__(self, model):
        self.optimizer = make_optimizer(OptimizerConfig())
        self.graph = graph_of(model)
        init = initializer(model, self.optimizer, seed=0)
        self.abstract = abstract_state(init, make_mesh(MeshConfig()))
        self.first = init_sharded(init, self.abstract)
        self.logits = jax.jit(lambda parameters, x: nnx.merge(self.graph, parameters)(x))
        self.update = functools.cache(self._update)

    def _update(self, accumulation_steps, **options):
        """Update without donating the argument."""
        step = make_train_step(
            self.graph,
            self.optimizer,
            accumulation_steps=accumulation_steps,
            out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract),
            **options,
        )
        others = jnp.float32(3e-4), jax.random.key_data(jax.random.key(0))
        return lambda state, batch: step(jax.tree.map(jnp.copy, state), batch, *others)


@pytest.fixture(scope="module")
def parts(small):
    return Parts(small.model)


def test_accumulated_parts_equal_the_whole_batch(parts):
    """Also if rows have different numbers of valid tokens."""
    batch = Batch(random_tokens(0), jnp.arange(LENGTH)[None] < jnp.arange(1, 17, 2)[:, None])
    whole, metrics = parts.update(1)(parts.first, batch)
    summed, same_metrics = parts.update(4)(parts.first, batch)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-3)
    for name in metrics:
        assert float(metrics[name]) == pytest.approx(float(same_metrics[name]), rel=1e-5)


def test_an_average_of_the_weights_follows_them(parts):
    """With decay min(0.5, (1 + n) / (10 + n)) at step n, and not in a skipped update."""
    options = {"ema_decay": 0.5, "objective": next_token_or_harm, "skip_grad_norm_ratio": 20.0}
    good = random_tokens(0)
    copy = jax.tree.map(jnp.copy, parts.first.parameters)
    state = dataclasses.replace(parts.first, average=copy)
    average = [np.asarray(x) for x in jax.tree.leaves(copy)]
    for number, tokens in enumerate((good, good, good.at[0, 0].set(1), good)):
        state, metrics = parts.update(1, **options)(state, everything(tokens))
        if number != 2:
            decay = min(0.5, (1 + number) / (10 + number))
            pairs = zip(average, jax.tree.leaves(state.parameters), strict=True)
            average = [decay * x + (1 - decay) * np.asarray(y) for x, y in pairs]
    assert int(metrics["skipped"]) == 1
    for have, want in zip(jax.tree.leaves(state.weights), average, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(parts):
    tokens = random_tokens(1)
    _, metrics = parts.update(1)(parts.first, everything(tokens))
    logits = parts.logits(parts.first.parameters, tokens[:, :-1])
    probabilities = np.asarray(jax.nn.softmax(logits), np.float64)
    picked = np.take_along_axis(probabilities, np.asarray(tokens[:, 1:, None]), -1)
    assert float(metrics["loss"]) == pytest.approx(float(-np.log(picked).mean()), rel=1e-5)


def test_gradients_are_those_of_the_mean_loss(parts):
    batch = everything(random_tokens(1))
    _, metrics = parts.update(4)(parts.first, batch)

    def mean_loss(parameters):
        logits = nnx.merge(parts.graph, parameters)(batch.tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()

    norm = optax.tree.norm(jax.jit(jax.grad(mean_loss))(parts.first.parameters))
    assert float(metrics["gradient_norm"]) == pytest.approx(float(norm), rel=1e-4)


def test_evaluation_counts_masked_tokens_only(parts):
    parameters, tokens = parts.first.parameters, random_tokens(1)
    counted = [8, 3, 0, 16, 1, 2, 5, 4]
    mask = jnp.arange(LENGTH)[None] < jnp.array(counted)[:, None]
    logits = parts.logits(parameters, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    evaluate = make_evaluation_step(parts.graph)
    total, correct, count = evaluate(parameters, Batch(tokens, mask), 0)
    assert int(count) == sum(counted)
    right = np.asarray(jnp.argmax(logits, -1) == tokens[:, 1:])
    assert int(correct) == sum(row[:n].sum() for row, n in zip(right, counted, strict=True))
    expected = sum(row[:n].sum() for row, n in zip(np.asarray(losses), counted, strict=True))
    assert float(total) == pytest.approx(expected, rel=1e-5)


def test_the_program_does_not_depend_on_rates_and_steps(parts):
    """So that it is compiled once for all schedules, lengths and seeds."""
    batch = everything(random_tokens(0))
    others = jnp.float32(3e-4), jax.random.key_data(jax.random.key(0))
    programs = set()
    for fields in ({}, {"learning_rate": 1.0, "warmup_steps": 7, "schedule": "constant"}):
        optimizer = make_optimizer(OptimizerConfig(**fields))
        step = make_train_step(parts.graph, optimizer, accumulation_steps=1, out_shardings=None)
        programs.add(step.lower(parts.first, batch, *others).as_text())
    assert len(programs) == 1


@pytest.mark.parametrize("harm", [1, 2, 3], ids=lambda harm: f"{FACTORS[harm]:g}")
def test_a_harmful_update_changes_nothing_and_is_counted(parts, harm):
    step = parts.update(1, objective=next_token_or_harm, skip_grad_norm_ratio=20.0)
    good = random_tokens(0)
    harmful = good.at[0, 0].set(harm)

    def leaves(state):
        return [x.tobytes() for x in jax.tree.leaves((state.parameters, state.optimizer))]

    state, counts = parts.first, []
    for tokens in (good, harmful, harmful, good):
        before, mean_norm = leaves(state), float(state.guard.mean_grad_norm)
        state, metrics = step(state, everything(tokens))
        assert (leaves(state) == before) == (tokens is harmful)
        if tokens is harmful:  # finite norms raise the mean as the limit, 20 times the mean, would
            raised = 1.19 if np.isfinite(FACTORS[harm]) else 1.0
            assert float(state.guard.mean_grad_norm) == pytest.approx(mean_norm * raised)
        else:
            assert float(state.guard.mean_grad_norm) != mean_norm
        counts.append((int(metrics["skipped"]), int(metrics["consecutive_skips"])))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0)]
    assert int(state.step) == 4


def test_training_continues_when_gradients_stay_large():
    """Skipping changes no parameters, so gradients 1000 times the usual can stay forever."""
    check = jax.jit(functools.partial(Guard.check_update, skip_grad_norm_ratio=20.0))
    guard, loss = Guard.first(), jnp.float32(1)
    for norm in [1.0] * 3 + [1e3] * 30:
        gradients = {"w": jnp.full((4,), norm / 2)}
        is_good, guard = check(guard, loss, gradients, gradients)
    assert is_good
    assert 20 < int(guard.skipped) < 25  # 20 * 1.19^n exceeds 1000 after 23 updates


def test_initial_weights_follow_from_the_seed(small):
    a, b, c = (
        nnx.state(LanguageModel(small.model, rngs=nnx.Rngs(seed)))["embed"]["embedding"][...]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(a, b)
    assert not jnp.array_equal(a, c)
