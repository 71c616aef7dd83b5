"""Program with 8 virtual devices: layers on a mesh of rows, heads and tokens.

Prints the differences of outputs, states and gradients from those without a mesh, for packed
documents and for a sequence that continues from a state; and the error of a layer whose states do
not merge.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)  # small outputs are normalized: rounding is amplified

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from heinsen_jax.attention import Attention, build  # noqa: E402
from heinsen_jax.sharding import MeshConfig, make_mesh  # noqa: E402

ROWS, LENGTH, WIDTH = 4, 48, 8
OPTIONS = {
    "log": {"implementation": "scan", "decay": "feature"},
    "log_window": {"window_size": 5, "positions": "rotary"},
    "log_window, decay": {"window_size": 5, "decay": "head"},
}


def layer(name: str) -> Attention:
    options = OPTIONS.get(name, {})
    sizes = {"model_dim": WIDTH, "num_heads": 2, "dtype": jnp.float64, "param_dtype": jnp.float64}
    return build(name.partition(",")[0], **sizes, rngs=nnx.Rngs(0), **options)


def on_and_off(function: Callable, *arguments: Any) -> float:
    """Return the largest relative difference between results on the mesh and without one."""
    expected = jax.jit(function)(*arguments)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2, context=2))):
        actual = jax.jit(function)(*arguments)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    finite = [(np.where(np.isfinite(b), a, 0), np.where(np.isfinite(b), b, 0)) for a, b in pairs]
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1)) for a, b in finite)


def errors(name: str) -> dict[str, float]:
    graph, parameters = nnx.split(layer(name))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, LENGTH, WIDTH))
    segments = np.cumsum(rng.uniform(size=(ROWS, LENGTH)) < 0.1, 1).astype(np.int32)

    def packed(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> Any:
            y = nnx.merge(graph, parameters)(x, segment_ids=segments)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, has_aux=True)(x)

    def streamed(x: jax.Array) -> Any:
        module = nnx.merge(graph, parameters)
        first, state = module(x[:, : LENGTH // 2], return_state=True)
        second, state = module(x[:, LENGTH // 2 :], state=state, return_state=True)
        return first, second, state

    return {"packed": on_and_off(packed, x), "streamed": on_and_off(streamed, x)}


def refusal(name: str) -> str:
    module = layer(name)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2, context=2))):
        try:
            module(jnp.zeros((ROWS, LENGTH, WIDTH)))
        except NotImplementedError as error:
            return str(error)
    return ""


def main() -> None:
    names = json.loads(sys.argv[1])
    found = {name: errors(name) for name in names}
    print(json.dumps({"errors": found, "refusal": refusal("softmax")}))


if __name__ == "__main__":
    main()
