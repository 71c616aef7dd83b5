"""Call the exported functions of a folder; each has arguments in NumPy files."""

import sys
from pathlib import Path

import jax
import numpy as np

import heinsen_jax.models  # noqa: F401  (registers the pytrees of states)

for file in Path(sys.argv[1]).glob("*.exported"):
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    for arguments in file.parent.glob(f"{file.stem}.*.npz"):
        with np.load(arguments) as arrays:
            leaves = [arrays[f"arr_{index}"] for index in range(len(arrays.files))]
        args, keywords = jax.tree.unflatten(exported.in_tree, leaves)
        results = [exported.call(*args, **keywords)]
        if exported.has_vjp():
            results += exported.vjp().call(*args, jax.numpy.ones_like(results[0]))
        np.savez(arguments.with_suffix(".out"), *jax.tree.leaves(results))
        arguments.with_suffix(".out.npz").rename(arguments.with_suffix(".results"))
