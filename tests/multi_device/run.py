"""Runs in a process of its own with 8 virtual devices: prints what one mesh computes, as JSON.

python run.py WORKDIR '{"data": 2, "fsdp": 4}'
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from heinsen_jax import data  # noqa: E402
from heinsen_jax.config import ExperimentConfig, load_config  # noqa: E402
from heinsen_jax.sharding import MeshConfig, make_mesh  # noqa: E402
from heinsen_jax.training.checkpoint import Checkpoints  # noqa: E402
from heinsen_jax.training.loop import train  # noqa: E402
from heinsen_jax.training.metrics import read_metrics  # noqa: E402
from heinsen_jax.training.optimizer import make_optimizer  # noqa: E402
from heinsen_jax.training.state import abstract_state, initializer  # noqa: E402


def main() -> None:
    workdir, mesh = Path(sys.argv[1]), MeshConfig(**json.loads(sys.argv[2]))
    config: ExperimentConfig = dataclasses.replace(load_config(sys.argv[3]), mesh=mesh)
    workdir.mkdir(exist_ok=True)
    train(workdir, data.load(config.data), config)

    init = initializer(
        config.model, make_optimizer(config.optimizer, config.training.steps), config.seed
    )
    abstract = abstract_state(init, make_mesh(mesh))
    with Checkpoints(workdir) as checkpoints:
        state = checkpoints.restore(config.training.steps, abstract)
    kernel = state.optimizer[1][0].mu["blocks"][0]["attention"]["project"]["kernel"][...]
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "rows": read_metrics(workdir),
                "norms": [float(abs(x).sum()) for x in jax.tree.leaves(state.parameters)],
                "moment_shape": kernel.shape,
                "moment_shard_shape": kernel.addressable_shards[0].data.shape,
            }
        )
    )


if __name__ == "__main__":
    main()
