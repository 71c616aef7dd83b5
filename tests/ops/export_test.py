"""Ops are exported with symbolic numbers of sequences and tokens, and called in another process."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.export import export, symbolic_shape

from heinsen_jax import ops
from heinsen_jax.attention import mechanism, names
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from tests.multi_device.apart import start

PLATFORMS = "cpu", "cuda", "tpu"
pytest.importorskip("flatbuffers")  # the extra `export`

OF_ONE_SEQUENCE = "l1", "l1_sparse", "additive"  # no symbolic batch
PROGRAM = Path(__file__).with_name("export_run.py")
HEADS, DEPTH = 2, 8
SHORT_SHAPES = (2, 1), (1, 7), (2, 1100)
SHAPES = (2, 1), (3, 130), (1, 1025)
ARRAYS = {
    "query": ((HEADS, DEPTH), jnp.float32),
    "key": ((HEADS, DEPTH), jnp.float32),
    "value": ((HEADS, DEPTH), jnp.float32),
    "log_decay": ((HEADS,), jnp.float32),
    "feature_decay": ((HEADS, DEPTH), jnp.float32),
    "erase": ((HEADS,), jnp.float32),
    "segment_ids": ((), jnp.int32),
}
"""Axes after batch and tokens, and dtype."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with its options, and its further arrays."""

    op: Callable
    arrays: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    shapes: tuple[tuple[int, int], ...] = SHAPES
    has_gradient: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return "query", "key", "value", *self.arrays

    def __call__(self, query, key, value, *arrays):
        names = ["log_decay" if name == "feature_decay" else name for name in self.arrays]
        keywords = dict(zip(names, arrays, strict=True))
        return self.op(query, key, value, **keywords, **dict(self.options))


FORWARD = {
    name: Case(getattr(ops, name), options=options, shapes=SHORT_SHAPES, has_gradient=False)
    for name, options in {
        "log_attention": (),
        "heinsen_attention": (),
        "linear_attention": (),
        "gated_delta_rule": (),
        "dot_product_attention": (("is_causal", True),),
    }.items()
}
SHORT = "log_attention", "linear_attention"
UNMASKED = ("is_causal", False)
FURTHER = {
    **{f"{name}, gradient": Case(case.op, (), case.options) for name, case in FORWARD.items()},
    "log_attention, decay": Case(ops.log_attention, ("log_decay",)),
    "log_attention, decay by feature": Case(ops.log_attention, ("feature_decay",)),
    "log_attention, segments": Case(ops.log_attention, ("segment_ids",)),
    "log_attention, bidirectional": Case(ops.log_attention, (), (UNMASKED,)),
    "log_attention, window": Case(ops.log_attention, (), (("local_window_size", 33),)),
    "heinsen_attention, bidirectional": Case(ops.heinsen_attention, ("segment_ids",), (UNMASKED,)),
    "linear_attention, bidirectional": Case(ops.linear_attention, ("segment_ids",), (UNMASKED,)),
    "gated_delta_rule, erase": Case(ops.gated_delta_rule, ("log_decay", "erase")),
    "gated_delta_rule, decay by feature": Case(ops.gated_delta_rule, ("feature_decay", "erase")),
    "dot_product_attention, bidirectional": Case(ops.dot_product_attention),
    "dot_product_attention, window": Case(
        ops.dot_product_attention, ("segment_ids",), (("local_window_size", 33),)
    ),
    "dot_product_attention, decay": Case(
        ops.dot_product_attention, ("log_decay",), (("is_causal", True),)
    ),
}


def draw(names: tuple[str, ...], batch: int, length: int) -> list[jax.Array]:
    def one(index: int, name: str) -> jax.Array:
        axes, dtype = ARRAYS[name]
        key, shape = jax.random.key(index), (batch, length, *axes)
        if name == "segment_ids":
            return jnp.broadcast_to(jnp.arange(length, dtype=dtype) // 50, shape)
        x = jax.random.normal(key, shape, dtype)
        if name.endswith("decay"):
            return -jnp.abs(x)
        return jax.nn.sigmoid(x) if name == "erase" else x / (DEPTH**0.5 if name == "key" else 1)

    return [one(index, name) for index, name in enumerate(names)]


def save(folder: Path, name: str, function: Callable, abstract: list, examples: list, order=0):
    exported = export(jax.jit(function), platforms=PLATFORMS)(*abstract)
    (folder / f"{name}.exported").write_bytes(exported.serialize(vjp_order=order))
    for index, args in enumerate(examples):
        np.savez(folder / f"{name}.{index}.npz", *jax.tree.leaves(args))


def results_of(folder: Path, name: str, index: int) -> list[np.ndarray]:
    with np.load(folder / f"{name}.{index}.results") as results:
        return [results[f"arr_{index}"] for index in range(len(results.files))]


def save_case(folder: Path, name: str, case: Case) -> None:
    shape = symbolic_shape("b, t")
    abstract = [jax.ShapeDtypeStruct((*shape, *ARRAYS[x][0]), ARRAYS[x][1]) for x in case.names]
    examples = [draw(case.names, *shape) for shape in case.shapes]
    save(folder, name, case, abstract, examples, int(case.has_gradient))


def check_case(folder: Path, name: str, case: Case) -> None:
    function = jax.jit(case)
    for index, shape in enumerate(case.shapes):
        args = draw(case.names, *shape)
        right, pullback = jax.vjp(function, *args) if case.has_gradient else (function(*args), None)
        output, *gradients = results_of(folder, name, index)
        limit = 2e-6 * max(jnp.max(jnp.abs(right)), 1)  # inputs are of size 1
        assert jnp.max(jnp.abs(output - right)) <= limit, shape
        if pullback is not None:
            pairs = zip(gradients, pullback(jnp.ones_like(right)), strict=True)
            pairs = [(x, y) for x, y in pairs if y.dtype != jax.dtypes.float0]
            errors = [float(jnp.max(jnp.abs(x - y))) for x, y in pairs]
            assert max(errors) <= 1e-5 * max(float(jnp.max(jnp.abs(y))) for _, y in pairs), shape


def run_apart(folder: Path) -> None:
    process = start(str(PROGRAM), str(folder))
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param({x: FORWARD[x] for x in SHORT}, id="values"),
        *(
            pytest.param({name: case}, id=name, marks=pytest.mark.nightly)
            for name, case in {**FORWARD, **FURTHER}.items()
            if name not in SHORT
        ),
    ],
)
def test_exported_ops_equal_ops(cases, tmp_path):
    for name, case in cases.items():
        save_case(tmp_path, name, case)
    run_apart(tmp_path)
    for name, case in cases.items():
        check_case(tmp_path, name, case)


def test_a_scan_over_a_symbolic_number_of_tokens_is_refused():
    (length,) = symbolic_shape("t")
    array = jax.ShapeDtypeStruct((length, HEADS, DEPTH), jnp.float32)
    scan = partial(ops.log_attention, implementation="scan")
    with pytest.raises(NotImplementedError, match="symbolic number of tokens"):
        export(jax.jit(scan))(array, array, array)


def log_attention_step(query, key, log_value, state):
    return ops.log_attention(query, key, log_value, initial_state=state, return_state=True)


def model_step(name: str) -> tuple[Callable, list, list]:
    """A model's next-token function of (parameters, token, state), and its arguments."""
    config = LanguageModelConfig(
        vocab_size=64, model_dim=16, num_layers=2, num_heads=2, attention=name
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(model)
    leaves, structure = jax.tree.flatten(parameters)

    def step(leaves, token, state):
        model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        return model(token, state=state, return_state=True)

    def arguments(batch):
        state = jax.eval_shape(
            lambda token: model.init_state(token.shape[:-1], capacity=8),
            jax.ShapeDtypeStruct((*batch, 1), jnp.int32),
        )
        return [leaves, jax.ShapeDtypeStruct((*batch, 1), jnp.int32), state]

    batch = () if name in OF_ONE_SEQUENCE else symbolic_shape("b")
    state = model.init_state((3,) if batch else (), capacity=8)
    token = jnp.arange(3, dtype=jnp.int32)[:, None] if batch else jnp.ones(1, jnp.int32)
    _, state = model(token, state=state, return_state=True)
    return step, arguments(batch), [leaves, token, state]


def check_step(folder: Path, function: Callable, abstract: list, args: list) -> None:
    save(folder, "step", function, abstract, [args])
    run_apart(folder)
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for x, y in zip(results_of(folder, "step", 0), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


def test_a_step_with_a_state(tmp_path):
    args = draw(("query", "key", "value"), 3, 1)
    _, state = ops.log_attention(*draw(("query", "key", "value"), 3, 5), return_state=True)
    (batch,) = symbolic_shape("b")
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), [*args, state]
    )
    check_step(tmp_path, log_attention_step, abstract, [*args, state])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in names() if mechanism(name).capabilities.streaming]
)
def test_a_step_of_a_model(name, tmp_path):
    check_step(tmp_path, *model_step(name))
