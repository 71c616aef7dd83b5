"""Learning-rate schedule, and weight decay by parameter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.training.optimizer import (
    decay_mask,
    describe_warmup,
    learning_rates,
    make_optimizer,
    warmup_steps,
)


def param(value, kind="matrix"):
    return nnx.Param(value, kind=kind)


def default_parameters():
    model = nnx.eval_shape(lambda: LanguageModel(LanguageModelConfig(), rngs=nnx.Rngs(0)))
    return nnx.state(model, nnx.Param)


def test_decay_acts_on_the_originals_groups():
    parameters = default_parameters()
    mask = jax.tree.leaves(decay_mask(parameters))
    sizes = [x.size for x in jax.tree.leaves(parameters)]
    decayed = sum(size for size, on in zip(sizes, mask, strict=True) if on)
    assert decayed == 124_747_776
    assert sum(sizes) - decayed == 132_096


def test_decay_groups_equal_the_originals_by_name(golden):
    case = golden("glm_sym")
    names = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, on in jax.tree_util.tree_leaves_with_path(decay_mask(default_parameters()))
        if on
    }
    per_layer = {name for name in names if name.startswith("blocks.")}
    num_layers = int(case["config"][2])
    assert len(per_layer) * num_layers + len(names - per_layer) == len(case["decay_names"])


def test_learning_rate_warms_up_linearly_and_decays_along_a_cosine():
    config = OptimizerConfig(learning_rate=6e-4, end_learning_rate=6e-5, warmup_steps=10)
    rates = learning_rates(config, 110)
    assert rates.shape == (110,)
    last = 6e-5 + (6e-4 - 6e-5) * (1 + np.cos(np.pi * 99 / 100)) / 2
    np.testing.assert_allclose(
        rates[[0, 5, 10, 60, 109]],
        [6e-4 / 11, 6e-4 * (1 / 11 + 1) / 2, 6e-4, 3.3e-4, last],
        rtol=1e-5,
    )


def test_an_update_is_that_of_adamw_at_the_rate():
    """Also its decay: gradients of 1 at first move a parameter by the rate, and decay by more."""
    config = OptimizerConfig(weight_decay=0.1)
    parameters = {"w": param(jnp.full(1, 2.0)), "b": param(jnp.full(1, 2.0), "vector")}
    optimizer = make_optimizer(config)
    gradients = jax.tree.map(jnp.ones_like, parameters)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    np.testing.assert_allclose(updates["w"][...], -1.2, rtol=1e-5)
    np.testing.assert_allclose(updates["b"][...], -1.0, rtol=1e-5)


def test_schedules():
    def rates(**fields):
        sizes = {"learning_rate": 1.0, "end_learning_rate": 0.1, "warmup_steps": 10}
        return learning_rates(OptimizerConfig(**sizes | fields), 110)

    wsd = rates(schedule="wsd", decay_fraction=0.2)
    np.testing.assert_allclose(wsd[:11], np.linspace(1 / 11, 1, 11), rtol=1e-5)
    np.testing.assert_allclose(wsd[10:89], 1)
    np.testing.assert_allclose(wsd[88:], np.linspace(1, 0.1, 23)[:-1], rtol=1e-5)
    linear = rates(schedule="linear")
    np.testing.assert_allclose(linear[10:], np.linspace(1, 0.1, 101)[:-1], rtol=1e-5)
    np.testing.assert_allclose(rates(schedule="constant")[10:], 1)
    np.testing.assert_allclose(rates(schedule="constant", warmup_steps=0), 1)
    with pytest.raises(UserError, match=r"decay_fraction=0\.95 exceed training\.steps=110"):
        rates(schedule="wsd", decay_fraction=0.95)


def test_muon_orthogonalizes_the_matrices_of_layers_only():
    """Singular values of an update are those of an orthogonal matrix up to 30%, times the factor
    that gives it the root mean square of AdamW; other parameters have Adam's."""
    config = OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=1e9)
    shapes = {"matrix": (2, 8, 24), "vector": (2, 3, 4), "embedding": (9, 8)}
    parameters = {kind: param(jnp.zeros(shape), kind) for kind, shape in shapes.items()}
    optimizer = make_optimizer(config)
    keys = iter(jax.random.split(jax.random.key(0), 9))
    gradients = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), parameters)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    singular = np.linalg.svd(updates.pop("matrix")[...])[1] / (0.2 * 24**0.5)
    np.testing.assert_allclose(singular, 1, atol=0.35)
    gradients.pop("matrix")
    adam = jax.tree.map(lambda x: -jnp.sign(x), gradients)
    for have, want in zip(*map(jax.tree.leaves, (updates, adam)), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4)


def test_lion_moves_by_signs_and_decays():
    config = OptimizerConfig(name="lion", weight_decay=0.1)
    parameters = {"w": param(jnp.full(2, 2.0))}
    optimizer = make_optimizer(config)
    gradients = {"w": param(jnp.array([1.0, -1e-3]))}
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    np.testing.assert_allclose(updates["w"][...], [-1.2, 0.8], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "steps", "warmup"),
    [
        ({"warmup_steps": 10}, 11, 10),
        ({"warmup_steps": 10}, 10, 1),
        ({"warmup_steps": 100}, 8, 1),
        ({"warmup_steps": 100}, 80, 8),
        ({"warmup_steps": 100}, 1, 0),
        ({"warmup_steps": 90, "schedule": "wsd"}, 100, 10),
        ({"warmup_steps": 90, "schedule": "wsd"}, 1, 0),
    ],
)
def test_a_warm_up_that_does_not_fit_is_shortened(fields, steps, warmup):
    """To the schedule of the shorter warm-up, which a line names."""
    config = OptimizerConfig(**fields)
    fitting = replace(config, warmup_steps=warmup)
    assert warmup_steps(config, steps) == warmup
    np.testing.assert_array_equal(learning_rates(config, steps), learning_rates(fitting, steps))
    assert describe_warmup(fitting, steps) == []
    lines = describe_warmup(config, steps)
    if warmup == config.warmup_steps:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"warm-up: {warmup} updates in place of optimizer.warmup_steps=")


def test_gradients_are_clipped_by_their_global_norm():
    parameters = {"w": param(jnp.zeros(4)), "b": param(jnp.zeros(1), "vector")}
    config = OptimizerConfig(clip_norm=1.0, warmup_steps=1, weight_decay=0.0)
    optimizer = make_optimizer(config)

    def moments(scale):
        gradients = jax.tree.map(lambda x: jnp.full(x.shape, scale), parameters)
        _, state = optimizer.update(gradients, optimizer.init(parameters), parameters)
        return state[1][0].mu

    large, larger = moments(10.0), moments(1e6)
    np.testing.assert_allclose(large["w"][...], larger["w"][...], rtol=1e-5)
    np.testing.assert_allclose(large["w"][...], 0.1 / 5**0.5, rtol=1e-5)
