"""Optimizers and learning-rate schedules of optax, with weight decay on matrices and embeddings
only."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from heinsen_jax.attention.parameters import LORA, ParameterKind, in_float32
from heinsen_jax.errors import UserError
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.typing import Array, Key, PyTree

RMS_OF_ADAM = 0.2
"""Root mean square of Muon's updates, so that it has AdamW's learning rates (Liu et al., 2025,
equation 4)."""

Choice = TypeVar("Choice")


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Number of steps of warm-up: `config.warmup_steps` if they end before training or its decay,
    else a tenth of the steps.

    Raises:
      UserError: a tenth of the steps overlaps with the decay.

    Examples:
      >>> warmup_steps(OptimizerConfig(warmup_steps=100), 1000)
      100
      >>> warmup_steps(OptimizerConfig(warmup_steps=100), 80)
      8
    """
    most = steps - _decay_steps(config, steps)
    if config.warmup_steps <= most:
        return config.warmup_steps
    tenth = min(config.warmup_steps, max(1, steps // 10), steps - 1)
    if tenth > most:
        raise UserError(
            f"optimizer.warmup_steps={config.warmup_steps} and "
            f"optimizer.decay_fraction={config.decay_fraction} exceed training.steps={steps}; make "
            "one of them smaller"
        )
    return tenth


def _decay_steps(config: OptimizerConfig, steps: int) -> int:
    """Least number of steps after warm-up."""
    return max(1, round(steps * config.decay_fraction)) if config.schedule == "wsd" else 1


def describe_warmup(config: OptimizerConfig, steps: int) -> list[str]:
    """A line if the warm-up is shortened."""
    if (warmup := warmup_steps(config, steps)) == config.warmup_steps:
        return []
    return [
        f"warm-up: {warmup:,} updates in place of optimizer.warmup_steps={config.warmup_steps}, "
        f"which do not fit into training.steps={steps}"
    ]


@lru_cache
def learning_rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Learning rate of every step. The schedule would reach the last rate one step after the end.

    Raises:
      UserError: as `warmup_steps`.
    """
    warmup, peak, last = warmup_steps(config, steps), config.learning_rate, config.end_learning_rate
    decay = _decay_steps(config, steps) if config.schedule == "wsd" else steps - warmup
    match config.schedule:
        case "one_cycle":
            after = optax.cosine_decay_schedule(peak, decay, last / peak)
        case "constant":
            after = optax.constant_schedule(peak)
        case _:
            after = optax.linear_schedule(peak, last, decay, steps - warmup - decay)
    warm_up = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([warm_up, after], [warmup]) if warmup else after
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)), np.float32)


def make_optimizer(
    config: OptimizerConfig, trained: PyTree[bool] | None = None
) -> optax.GradientTransformation:
    """Clipping by global norm, the optimizer with learning rate 1, and weight decay. The update
    multiplies its result by the rate of the step, so that the compiled update does not depend on
    the schedule. With `trained`, all other parameters stay as they are, without optimizer state.

    References:
      Loshchilov, Hutter, 2019, Decoupled Weight Decay Regularization, arXiv:1711.05101.
      Chen et al., 2023, Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675.
      Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks.
      Liu et al., 2025, Muon is Scalable for LLM Training, arXiv:2502.16982.
    """
    betas = config.beta1, config.beta2
    optimizers = {
        "adamw": partial(optax.adam, 1.0, *betas),
        "lion": partial(optax.lion, 1.0, *betas, weight_decay=0.0),
        "muon": partial(_muon, config),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optimizers[config.name](),
        optax.add_decayed_weights(-config.weight_decay, decay_mask),
    )
    if trained is None:
        return optimizer
    return optax.partition({True: optimizer, False: optax.set_to_zero()}, trained)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon, with learning rate 1, for the matrices of the layers, and Adam for the rest."""

    def dimensions(parameters: PyTree[Array]) -> PyTree[MuonDimensionNumbers]:
        # The first axes stack layers, and matrices of a layer.
        return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), parameters)

    muon = optax.contrib.muon(
        1.0,
        beta=config.momentum,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=RMS_OF_ADAM,
    )
    adam = optax.adam(1.0, config.beta1, config.beta2)
    labels = partial(_by_kind, choose=lambda kind: "muon" if kind == "matrix" else "adam")
    return optax.partition({"muon": muon, "adam": adam}, labels)


def only_lora(parameters: PyTree) -> PyTree[bool]:
    """Pytree of booleans: the parameters that are low-rank additions."""
    names = flatten_with_names(parameters)
    return jax.tree.unflatten(jax.tree.structure(parameters), [LORA in x for x in names])


def apply_updates(
    parameters: PyTree[Array],
    updates: PyTree[Array],
    key: Key[Array, ""],
    trained: PyTree[bool] | None = None,
) -> PyTree[Array]:
    """Parameters after their updates, if they are `trained`. Parameters in bfloat16 are rounded up
    or down with probabilities such that the mean is the exact sum, since rounding to the nearest
    number would lose small updates.

    References:
      Zamirai et al., 2020, Revisiting BFloat16 Training, arXiv:2010.06192, section 4.
    """
    leaves, structure = jax.tree.flatten(parameters)
    changes = jax.tree.leaves(updates)
    chosen = [True] * len(leaves) if trained is None else jax.tree.leaves(trained)
    after = []
    for number, (x, update, is_trained) in enumerate(zip(leaves, changes, chosen, strict=True)):
        if is_trained and x.dtype == jnp.bfloat16:
            total = in_float32(x) + update
            after.append(_stochastically_rounded(total, jax.random.fold_in(key, number)))
        else:
            after.append(x + update if is_trained else x)
    return jax.tree.unflatten(structure, after)


def _stochastically_rounded(x: Array, key: Key[Array, ""]) -> Array:
    """x of float32 in bfloat16, which has the upper 16 of its 32 bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = bits + jax.random.bits(key, x.shape, jnp.uint16)
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))


def decay_mask(parameters: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[bool]:
    """Pytree of booleans: the parameters to which weight decay applies."""
    return _by_kind(parameters, lambda kind: kind != "vector")


def _by_kind(
    parameters: PyTree[Array | jax.ShapeDtypeStruct], choose: Callable[[str], Choice]
) -> PyTree[Choice]:
    """A choice for each parameter by its kind, `attention.parameters.ParameterKind`.

    Raises:
      ValueError: a parameter carries no kind.
    """

    def one(path: jax.tree_util.KeyPath, node: PyTree) -> PyTree[Choice]:
        metadata = node.get_metadata() if isinstance(node, nnx.Variable) else {}
        if metadata.get("kind") not in get_args(ParameterKind):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"parameter {name} has no kind; make it with attention.parameters.parameter, or as "
                f"nnx.Param(..., kind=...) with one of {', '.join(get_args(ParameterKind))}"
            )
        return jax.tree.map(lambda _: choose(metadata["kind"]), node)

    return jax.tree.map_with_path(one, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable))
