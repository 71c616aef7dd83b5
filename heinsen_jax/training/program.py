"""The programs of a run: its compiled update, its evaluation, and their arguments."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.data import Batch, DataConfig, train_batches
from heinsen_jax.models import LanguageModel, LanguageModelConfig, flops_per_token
from heinsen_jax.objectives.evaluation import evaluate, in_microbatches, make_evaluation_step
from heinsen_jax.objectives.objective import objective_of
from heinsen_jax.runtime.distributed import together
from heinsen_jax.sharding import batch_sharding, shard_batch, share_of_process
from heinsen_jax.training.distillation import Distillation
from heinsen_jax.training.initialization import fit_to_teacher
from heinsen_jax.training.memory import Limits, Memory, Setting, check_memory, memory_of
from heinsen_jax.training.optimizer import (
    describe_warmup,
    learning_rates,
    make_optimizer,
    only_lora,
)
from heinsen_jax.training.preflight import describe
from heinsen_jax.training.settings import Settings
from heinsen_jax.training.start import start_weights
from heinsen_jax.training.state import (
    TrainState,
    abstract_state,
    graph_of,
    init_sharded,
    initializer,
)
from heinsen_jax.training.step import make_train_step
from heinsen_jax.training.utilization import without_peak


class Program:
    """The update and the evaluation of a run. No weights are allocated before `initial_state`.

    Attributes:
      settings: the settings of the run.
      abstract: shapes, dtypes and shardings of the state.
      graph: the graph of the model.
      learning_rates: learning rate of each step, counted from 0.
      distillation: the teacher, if any.
      flops_per_token: model FLOPs of a token of training; None if they are not counted.
    """

    def __init__(self, settings: Settings):
        config = settings.config
        self.settings, self.config = settings, config
        self.data, self.dataset, self.mesh = settings.data, settings.dataset, settings.mesh
        self.model, self.training = config.model, config.training
        self.learning_rates = learning_rates(config.optimizer, config.training.steps)
        self.key_data = np.asarray(jax.random.key_data(jax.random.key(config.seed)))
        self.graph, self.trained = graph_of(self.model), None
        with together():
            self.distillation = Distillation.of(config.distillation, self.model)
            if self.distillation is not None:
                shapes = nnx.state(LanguageModel.abstract(self.model), nnx.Param)
                self.trained = self.distillation.trained(shapes)
        if self.model.lora_rank is not None:
            self.trained = only_lora(nnx.state(LanguageModel.abstract(self.model), nnx.Param))
        self.transform = make_optimizer(config.optimizer, self.trained)
        fraction, vocabulary = self.training.masked_fraction, self.dataset.vocab_size
        self.objective = objective_of(self.model, fraction, vocabulary)
        make_step = partial(make_evaluation_step, self.graph, self.objective)
        self.evaluation_step = make_step()
        by_position = self.training.loss_by_position
        self.step_by_position = make_step(by_position=True) if by_position else None
        self.ema_decay = config.optimizer.ema_decay
        has_average = self.ema_decay is not None
        self.init = initializer(self.model, self.transform, config.seed, has_average=has_average)
        self.abstract = abstract_state(self.init, self.mesh)
        self.count = sum(x.size for x in jax.tree.leaves(self.abstract.parameters))
        self.flops_per_token = flops_per_token(self.model, self.count, self.data.sequence_length)

    def compile(
        self, accumulation_steps: int | None = None, model: LanguageModelConfig | None = None
    ) -> jax.stages.Compiled:
        """Compile the update ahead of time for all steps, without allocating its arguments. Another
        number of microbatches or another model serves to measure the memory of other settings."""
        step = make_train_step(
            self.graph if model is None else graph_of(model),
            self.transform,
            accumulation_steps=accumulation_steps or self.training.accumulation_steps,
            out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract),
            objective=self.distillation or self.objective,
            trained=self.trained,
            skip_grad_norm_ratio=self.training.skip_grad_norm_ratio,
            z_loss=self.training.z_loss,
            ema_decay=self.ema_decay,
        )
        rows, length = self.data.batch_size, self.data.sequence_length
        abstract_rows = partial(jax.ShapeDtypeStruct, sharding=batch_sharding(self.mesh))
        tokens = abstract_rows((rows, length + 1), jnp.int32)
        is_separate = isinstance(self.data, DataConfig) and self.data.documents == "separate"
        segment_ids = tokens if is_separate else None
        labels = abstract_rows((rows, length), jnp.int32) if self.dataset.has_labels else None
        batch = Batch._make([tokens, abstract_rows((rows, length), bool), segment_ids, labels])
        constants = ()
        if self.distillation is not None:
            constants = (self.distillation.abstract_parameters(self.mesh),)
        arguments = self.learning_rates[0], self.key_data, *constants
        return step.lower(self.abstract, batch, *arguments).compile()

    def check_memory(self, update: jax.stages.Compiled) -> list[str]:
        """Check that the devices and this host have the memory of the update, before its arguments
        are allocated, and describe the memory of the host."""
        if (memory := memory_of(update)) is None:
            return []
        limits = Limits(self.abstract)
        check_memory(limits, memory, self._setting, self._measure)
        return [limits.describe(memory)]

    def setting_that_fits(self, *, may_change: bool) -> Setting:
        """The current setting, if the update fits into the memory, or another one of the same
        batch.

        Raises:
          UserError: as `check_memory`.
        """
        if (memory := memory_of(self.compile())) is None:
            return self._setting
        arguments = Limits(self.abstract), memory, self._setting, self._measure
        return check_memory(*arguments, may_change=may_change)

    @property
    def _setting(self) -> Setting:
        parts = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        steps = self.training.accumulation_steps
        return Setting(self.data.batch_size, steps, parts, self.model.remat)

    def _measure(self, accumulation_steps: int, remat: bool) -> Memory | None:
        """The memory of an update with other settings."""
        model = dataclasses.replace(self.model, remat=remat)
        return memory_of(self.compile(accumulation_steps, model))

    @cached_property
    def constants(self) -> tuple[nnx.State, ...]:
        """The parameters of the teacher, if any, on the devices."""
        if self.distillation is None:
            return ()
        parameters = jax.block_until_ready(self.distillation.parameters(self.mesh))
        self.distillation.release()
        return (parameters,)

    def arguments(self, step: int) -> tuple[np.float32, np.ndarray, *tuple[nnx.State, ...]]:
        """Further arguments of the update: learning rate of a step, counted from 0, the data of the
        run's random key, and the parameters of the teacher, if any."""
        return self.learning_rates[step], self.key_data, *self.constants

    def describe(self, update: jax.stages.Compiled) -> list[str]:
        parts = self.mesh, self.data, self.training, self.dataset
        warmup = describe_warmup(self.config.optimizer, self.training.steps)
        start = self.training.start
        is_rounded = self.model.param_dtype == "bfloat16" and self.model.lora_rank is None
        return [
            *describe(*parts, self.count, update),
            *([f"initial weights: {start}"] if start else []),
            *(["parameters in bfloat16, rounded stochastically"] if is_rounded else []),
            *warmup,
            *self.settings.lines,
            *without_peak(),
        ]

    def initial_state(self) -> TrainState:
        """The state before the first step, on the devices."""
        with together():
            given = self.distillation and self.distillation.start()
            if self.training.start is not None:
                given = start_weights(self.model, self.training.start)
        state = init_sharded(self.init, self.abstract, given)
        if not self.initialization_tokens:
            return state
        parameters = self._fitted(state.parameters)
        average = None if state.average is None else jax.tree.map(jnp.copy, parameters)
        return dataclasses.replace(state, parameters=parameters, average=average)

    @property
    def initialization_tokens(self) -> int:
        """Number of tokens of the fit to the teacher, in whole sequences; 0 without one, or if no
        layer has another mechanism."""
        tokens = self.config.distillation.initialization_tokens
        if not tokens or self.distillation is None or not any(self.distillation.replaced):
            return 0
        return self.rows_of(tokens) * self.data.sequence_length

    def _fitted(self, parameters: nnx.State) -> nnx.State:
        """The parameters, with new layers fitted to the teacher's."""
        distillation = self.distillation
        assert distillation is not None

        def fit(parameters: nnx.State, teacher: nnx.State, batch: Batch) -> nnx.State:
            theirs = nnx.merge(nnx.graphdef(distillation.teacher), teacher)
            return fit_to_teacher(nnx.merge(self.graph, parameters), theirs, batch)

        rows = self.initialization_tokens // self.data.sequence_length
        batches = self.batches(0, batch_size=rows)
        batch = shard_batch(next(batches), self.mesh)
        placed = jax.tree.map(lambda x: x.sharding, self.abstract.parameters)
        fitted = jax.jit(fit, out_shardings=placed, donate_argnums=0)
        return fitted(parameters, *self.constants, batch)

    def rows_of(self, tokens: int) -> int:
        """Number of sequences of at least that many tokens together, which the mesh divides."""
        parts = self._setting.parts
        return max(math.ceil(tokens / (self.data.sequence_length * parts)), 1) * parts

    def batches(self, start: int, *, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches of this process, from a step on, of the given or else the data's size."""
        process_index, process_count = share_of_process(self.mesh)
        return train_batches(
            self.dataset,
            dataclasses.replace(self.data, batch_size=batch_size or self.data.batch_size),
            seed=self.config.seed,
            start_step=start,
            process_index=process_index,
            process_count=process_count,
        )

    def evaluate(
        self, state: TrainState, before_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Metrics of a state on the validation split."""
        is_causal, limit = self.model.is_causal, self.training.evaluation_batches
        steps = self.training.accumulation_steps
        rows, limit = in_microbatches(self.data.batch_size, limit, steps, is_causal=is_causal)
        return evaluate(
            self.evaluation_step,
            state.weights,
            self.dataset,
            dataclasses.replace(self.data, batch_size=rows),
            self.mesh,
            max_batches=limit,
            is_causal=is_causal,
            step_by_position=self.step_by_position,
            before_batch=before_batch,
        )
