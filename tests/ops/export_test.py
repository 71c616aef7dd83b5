"""Ops are exported with symbolic numbers of sequences and tokens, and called in another process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export, symbolic_shape

from heinsen_jax import ops
from tests.multi_device.apart import start

PLATFORMS = "cpu", "cuda", "tpu"
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


def save(folder: Path, name: str, case: Case) -> None:
    shape = symbolic_shape("b, t")
    args = [jax.ShapeDtypeStruct((*shape, *ARRAYS[x][0]), ARRAYS[x][1]) for x in case.names]
    exported = export(jax.jit(case), platforms=PLATFORMS)(*args)
    (folder / f"{name}.exported").write_bytes(exported.serialize(vjp_order=case.has_gradient))
    for batch, length in case.shapes:
        np.savez(folder / f"{name}.{batch}x{length}.npz", *draw(case.names, batch, length))


def check(folder: Path, name: str, case: Case) -> None:
    function = jax.jit(case)
    for batch, length in case.shapes:
        args = draw(case.names, batch, length)
        expected = [function(*args)]
        if case.has_gradient:
            expected, pullback = jax.vjp(function, *args)
            expected = [expected, *pullback(jnp.ones_like(expected))]
        with np.load(folder / f"{name}.{batch}x{length}.results") as results:
            errors = {
                index: float(jnp.max(jnp.abs(results[f"arr_{index}"] - right)))
                for index, right in enumerate(expected)
                if right.dtype != jax.dtypes.float0
            }
            output, *gradients = (float(jnp.max(jnp.abs(expected[index]))) for index in errors)
            assert errors.pop(0) <= 2e-6 * max(output, 1), length  # inputs are of size 1
            assert max(errors.values(), default=0) <= 1e-5 * max(gradients, default=0), length


def run_apart(folder: Path) -> None:
    process = start(str(PROGRAM), str(folder))
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FORWARD, id="values"),
        *(pytest.param({k: v}, id=k, marks=pytest.mark.nightly) for k, v in FURTHER.items()),
    ],
)
def test_exported_ops_equal_ops(cases, tmp_path):
    for name, case in cases.items():
        save(tmp_path, name, case)
    run_apart(tmp_path)
    for name, case in cases.items():
        check(tmp_path, name, case)
