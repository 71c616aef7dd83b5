"""Training step of a configuration on random tokens, and its profile."""

import collections
import glob
import gzip
import json
import re
import tempfile
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.data import Batch
from heinsen_jax.sharding import MeshConfig, make_mesh
from heinsen_jax.training.optimizer import make_optimizer
from heinsen_jax.training.state import (
    TrainState,
    abstract_state,
    graph_of,
    init_sharded,
    initializer,
)
from heinsen_jax.training.step import make_train_step

CONTAINERS = ("while", "call", "cond")  # their time includes the operations that they run
KEY_DATA = np.zeros(2, np.uint32)
PARTS = ("log_attention", "attention", "norm", "position", "logits", "optimizer")


class TrainingStep:
    """Compiled update, which donates its state, on a random batch of tokens below `vocabulary`: of
    separate documents with a mean of `document_length` tokens, or continuous when None.

    The first call creates the state, and the first one after `free` does so again.
    """

    def __init__(
        self, config: ExperimentConfig, vocabulary: int, document_length: int | None = None
    ) -> None:
        optimizer = make_optimizer(config.optimizer)
        self.init = initializer(config.model, optimizer, config.seed)
        self.abstract = abstract_state(self.init, make_mesh(MeshConfig()))
        self.parameters = sum(x.size for x in jax.tree.leaves(self.abstract.parameters))
        shape = config.data.batch_size, config.data.sequence_length + 1
        rng = np.random.default_rng(0)
        tokens = jnp.asarray(rng.integers(0, vocabulary, shape))
        self.batch = Batch(tokens, jnp.ones_like(tokens[:, 1:], bool))
        if document_length is not None:
            ids = np.cumsum(rng.uniform(size=shape) < 1 / document_length, 1)
            within = jnp.asarray(ids[:, 1:] == ids[:, :-1])
            self.batch = Batch(tokens, within, jnp.asarray(ids, jnp.int32))
        step: Any = make_train_step(
            graph_of(config.model),
            optimizer,
            accumulation_steps=1,
            out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract),
        )
        self.others = self.batch, np.float32(config.optimizer.learning_rate), KEY_DATA
        lowered = step.lower(self.abstract, *self.others)
        self.program_bytes = len(lowered.as_text())
        self.compiled = lowered.compile()

    @cached_property
    def state(self) -> TrainState:
        return init_sharded(self.init, self.abstract)

    def free(self) -> None:
        """Free the memory of the state."""
        vars(self).pop("state", None)

    def __call__(self) -> Any:
        self.state, metrics = self.compiled(self.state, *self.others)
        return metrics


def profile(step: TrainingStep, steps: int = 30) -> dict[str, float]:
    """Return the share of each part of the model in the time of all operations, by named scopes."""
    step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(step())
        (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(file) as opened:
            events = json.load(opened)["traceEvents"]
    scopes = dict(re.findall(r"%?(\S+) = .*op_name=\"([^\"]*)\"", step.compiled.as_text()))
    times: collections.Counter[str] = collections.Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op")
        if event.get("ph") == "X" and operation and not operation.startswith(CONTAINERS):
            scope = scopes.get(operation, "")
            times[next((part for part in PARTS if part in scope), "rest")] += event["dur"]
    return {part: time / times.total() for part, time in times.most_common()}
