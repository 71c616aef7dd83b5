"""Names for the leaves of a pytree."""

from typing import Any

import jax

from heinsen_jax.typing import PyTree


def flatten_with_names(tree: PyTree) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as `blocks.0.norm.scale`.

    The names do not depend on the classes of containers, so that files written with one class can
    be read with another.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
