"""Array layouts shared by several ops: chunks of tokens, folded heads, types inside `shard_map`,
and symbolic sizes.

Public arrays are `[B, T, G, (R,) F]`: R query heads share each of G key/value heads. Inside an op,
batch and key/value heads are folded into one axis X = B G and tokens are split into J chunks of C,
so that every contraction is one batched matrix product.

With `jax.export`, batch and number of tokens may be symbolic. Then the same code is used as for a
long sequence, with blocks of a fixed size, in a number that is symbolic as well.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from heinsen_jax.typing import Array, Shaped, common_dtype, wide

Tree = TypeVar("Tree")


def is_symbolic(size: int) -> bool:
    """Whether a size is a symbolic dimension of `jax.export`, or depends on one."""
    return is_symbolic_dim(size)


def is_at_most(size: int, limit: int) -> bool:
    """Whether a size is within a limit. False for a symbolic one, which counts as large."""
    return not is_symbolic(size) and size <= limit


def nearly_equal_blocks(length: int, most: int, multiple: int = 1) -> tuple[int, int]:
    """Return the number and size of blocks for a number of tokens: at least one, of at most `most`
    tokens, a multiple of `multiple`, and as small as their number allows. Blocks of a symbolic
    number of tokens have `most`."""
    blocks = max(-(-length // most), 1)
    if is_symbolic(length):
        return blocks, most
    return blocks, -(-length // (blocks * multiple)) * multiple


def chunk(x: Shaped[Array, "B T G *R F"], size: int) -> Shaped[Array, "J X RC F"]:
    """`[B, J C, G, (R,) F]` -> `[J, X, R C, F]` with C = size."""
    if x.ndim == 4:
        x = x[:, :, :, None]
    batch, length, groups, heads, features = x.shape
    x = x.reshape(batch, length // size, size, groups, heads, features)
    x = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
    return x.reshape(length // size, batch * groups, heads * size, features)


def unchunk(
    x: Shaped[Array, "J X RC F"], groups: int, heads: int
) -> Shaped[Array, "B T {groups} {heads} F"]:
    """Invert it: `[J, X, R C, F]` -> `[B, J C, G, R, F]`."""
    chunks, folds, rows, features = x.shape
    x = x.reshape(chunks, folds // groups, groups, heads, rows // heads, features)
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
    return x.reshape(folds // groups, chunks * rows // heads, groups, heads, features)


def fold_heads(x: Array, groups: int) -> Array:
    """`[*B, T, N, F]` -> `[X, R, T, F]` in at least float32, X = B G, R = N / G."""
    *batch, length, heads, features = x.shape
    x = jnp.swapaxes(x, -3, -2).astype(wide(x))
    return x.reshape(math.prod(batch) * groups, heads // groups, length, features)


def unfold_heads(y: Array, query: Array, value: Array) -> Array:
    """`[X, R, T, V]` -> `[*B, T, N, V]`, in the dtype of the inputs."""
    *batch, length, heads, _ = query.shape
    y = y.reshape(math.prod(batch), heads, length, value.shape[-1])
    y = jnp.swapaxes(y, 1, 2).reshape(*batch, length, heads, value.shape[-1])
    return y.astype(common_dtype(query, value))


def repeat_rows(x: Shaped[Array, "*N C F"], heads: int) -> Shaped[Array, "*N RC F"]:
    """Repeat `[..., C, F]` for each query head: `[..., R C, F]`."""
    return x if heads == 1 else jnp.concatenate([x] * heads, -2)


def astype_like(tree: Tree, example: Tree) -> Tree:
    """Cast arrays to the dtypes of another pytree of the same structure, since a loop must return
    its carry in the dtype in which it was passed."""
    return jax.tree.map(lambda x, of: x.astype(of.dtype), tree, example)


def varying_like(tree: Tree, example: object) -> Tree:
    """Mark arrays as varying over the devices of an enclosing `jax.shard_map` if any array of
    `example` is, since loops and branches require equal types, which include this."""
    axes = frozenset[str]().union(*(_varying_axes(x) for x in jax.tree.leaves(example)))

    def cast(x: Array) -> Array:
        return lax.pcast(x, tuple(axes - _varying_axes(x)), to="varying")

    return jax.tree.map(cast, tree)


def equally_varying(arguments: Tree) -> Tree:
    """Mark all arrays among arguments as varying over the same devices of a `jax.shard_map`."""
    leaves, structure = jax.tree.flatten(arguments)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    cast = iter(varying_like(arrays, arrays))
    leaves = [next(cast) if isinstance(x, jax.Array) else x for x in leaves]
    return jax.tree.unflatten(structure, leaves)


def _varying_axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
