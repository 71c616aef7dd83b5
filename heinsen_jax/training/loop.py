"""The training loop: from configurations to a trained model in a run's folder."""

import contextlib
import dataclasses
import json
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.data import Batch, DataConfig, train_batches
from heinsen_jax.errors import UserError
from heinsen_jax.generate import sample
from heinsen_jax.models import LanguageModel, LanguageModelConfig, flops_per_token
from heinsen_jax.objectives.evaluation import evaluate, make_evaluation_step
from heinsen_jax.objectives.objective import objective_of
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runtime.distributed import check_alike, gather, process_0_first, together
from heinsen_jax.runtime.environment import environment
from heinsen_jax.runtime.signals import Signals
from heinsen_jax.runtime.timeouts import with_timeout
from heinsen_jax.sharding import batch_sharding, shard_batch, share_of_process
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.config import as_json
from heinsen_jax.training.distillation import Distillation
from heinsen_jax.training.loss_plot import PLOT_FILE, plot_losses
from heinsen_jax.training.memory import Limits, Memory, Setting, check_memory, memory_of
from heinsen_jax.training.metrics import Reporter
from heinsen_jax.training.optimizer import describe_warmup, learning_rates, make_optimizer
from heinsen_jax.training.pacing import InFlight, Requests
from heinsen_jax.training.preflight import describe, time_updates, tokens_per_update
from heinsen_jax.training.prepare import Prepared, record
from heinsen_jax.training.profiling import Clock, Tracer
from heinsen_jax.training.state import (
    TrainState,
    abstract_state,
    graph_of,
    init_sharded,
    initializer,
)
from heinsen_jax.training.step import Metrics, make_train_step
from heinsen_jax.training.tracker_services import services
from heinsen_jax.training.trackers import TrackedRun, Tracker, Tracking
from heinsen_jax.training.utilization import model_flops_utilization, without_peak


class Diverged(UserError):
    """Too many consecutive updates were skipped."""


class _Stopped(Exception):
    """A signal, whose number is the argument, interrupted an evaluation."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of training.

    Attributes:
      step: number of the last step; a step is one update.
      metrics: metrics of the last evaluation; empty if a signal stopped this call before its
        first one.
      signal: number of the signal that stopped training, or None.
    """

    step: int
    metrics: dict[str, float]
    signal: int | None = None


def train(prepared: Prepared, *, trackers: Sequence[Tracker] = ()) -> TrainingResult:
    """Train from the latest checkpoint in the run's folder, or from the start, to the last step.

    SIGTERM, SIGHUP and SIGINT in any of the processes save a checkpoint after the current step and
    end training early. Before the first step, this function does not handle them.

    Args:
      prepared: the run, of `prepare_run`; closed at the end.
      trackers: trackers of the metrics, in addition to `training.trackers`; process 0 calls them.

    Raises:
      UserError: all checkpoints of the run are lost; the weights of its teacher have changed; a
        tracker cannot start; the run does not fit into memory; or a file cannot be written.
      Diverged: `max_consecutive_skips` consecutive updates were skipped.

    Examples:
      A run that only reports its cost:

          train(prepare_run(load_config("quickstart"), "runs/quickstart", dry_run=True))
    """
    with prepared, jax.set_mesh(prepared.settings.mesh), prepared.folder.published():
        run = _Run(prepared, trackers)
        return run.dry_run() if prepared.dry_run else run()


def check_fits(prepared: Prepared) -> None:
    """Compile the update of a run that begins later, and check that it fits into memory.

    Raises:
      UserError: it does not fit.
    """
    with jax.set_mesh(prepared.settings.mesh):
        run = _Run(prepared)
        run._check_memory(run._compiled())


class _Run:
    """State of one call of `train`."""

    def __init__(self, prepared: Prepared, trackers: Sequence[Tracker] = ()):
        settings = prepared.settings
        self.prepared, self.given_trackers = prepared, trackers
        self.folder, self.workdir = prepared.folder, prepared.folder.files
        self.experiment, self.data = settings.config, settings.data
        self.dataset, self.mesh = settings.dataset, settings.mesh
        experiment = settings.config
        self.seed = experiment.seed
        self.model = experiment.model
        self.training = experiment.training
        self.learning_rates = learning_rates(experiment.optimizer, self.training.steps)
        self.key_data = np.asarray(jax.random.key_data(jax.random.key(self.seed)))
        self.graph, self.trained = graph_of(self.model), None
        with together():
            self.distillation = Distillation.of(experiment.distillation, self.model)
            if self.distillation is not None:
                shapes = nnx.state(LanguageModel.abstract(self.model), nnx.Param)
                self.trained = self.distillation.trained(shapes)
        self.transform = make_optimizer(experiment.optimizer, self.trained)
        fraction = self.training.masked_fraction
        self.objective = objective_of(self.model, fraction, self.dataset.vocab_size)
        make_step = partial(make_evaluation_step, self.graph, self.objective)
        self.evaluation_step = make_step()
        by_position = self.training.loss_by_position
        self.step_by_position = make_step(by_position=True) if by_position else None
        self.ema_decay = experiment.optimizer.ema_decay
        has_average = self.ema_decay is not None
        self.init = initializer(self.model, self.transform, self.seed, has_average=has_average)
        self.abstract = abstract_state(self.init, self.mesh)
        self.count = sum(x.size for x in jax.tree.leaves(self.abstract.parameters))
        self.flops_per_token = flops_per_token(self.model, self.count, self.data.sequence_length)

    def __call__(self) -> TrainingResult:
        is_first = jax.process_index() == 0
        with together():
            trackers = [*services(self.training.trackers), *self.given_trackers] if is_first else []
            tracking = Tracking(trackers, lambda text: self.reporter.line(text))
        with tracking as self.tracking:
            result = self._train()
            # After the last save: its deadline does not include waiting for trackers.
            self.tracking.finish("finished" if result.signal is None else "stopped")
        return result

    def _train(self) -> TrainingResult:
        keep, steps = self.training.keep_checkpoints, self.training.steps
        with (
            contextlib.ExitStack() as outer,
            Checkpoints(self.folder, keep=keep) as self.checkpoints,
        ):
            start, lost = self._start()
            with contextlib.ExitStack() as files:
                with together():
                    reporter = Reporter(
                        self.workdir, start_step=start or 0, steps=steps, log=self.tracking.log
                    )
                    self.reporter = files.enter_context(reporter)
                for line in lost:
                    self.reporter.line(line)
                if start is not None and start >= steps:
                    return self._finished(start)
                with together():
                    if jax.process_index() == 0:
                        self.tracking.start(self._tracked(start or 0))
                self.reporter.line("compiling the update")
                started = time.monotonic()
                update = self._compiled()
                self.reporter.line(f"compiled in {time.monotonic() - started:.1f} s")
                for line in [*self._described(update), *self._check_memory(update)]:
                    self.reporter.line(line)
                if start is None:
                    with together():
                        given = self.distillation and self.distillation.start()
                    start, state = 0, init_sharded(self.init, self.abstract, given)
                    del given
                else:
                    self.reporter.line(f"continuing {self.folder} from step {start}")
                    state = self.checkpoints.restore(start, self.abstract)
                with together():
                    if jax.process_index() == 0:
                        record(self.workdir, self.experiment, self.dataset)
                    self.folder.publish()
                # Handled until the last save ends, also after an error: its deadline still holds.
                self.signals = outer.enter_context(Signals(self.training.shutdown_timeout))
                self.reporter.begin()
                result = self._steps(state, start, update)
                self.checkpoints.wait()
        self._conclude(result)
        return result

    def _start(self) -> tuple[int | None, list[str]]:
        """The step to resume from, or None for a new run; and warnings about lost steps."""
        with together():
            lost = self.checkpoints.losses()
            recorded = 0
            if jax.process_index() == 0:
                recorded = max((int(row["step"]) for row in read_metrics(self.workdir)), default=0)
                self.checkpoints.check_lost(
                    "bring one back, or give --restart to set the run aside and begin at step 1",
                    recorded=recorded,
                )
                self.checkpoints.record_newest(default=0)
        start = self.checkpoints.latest_step()
        lost = [f"warning: {words}: step {start} is used" for words in lost]
        if start is None and recorded:
            lost.append(
                f"warning: the run ended after step {recorded}, before its first checkpoint: it "
                "begins at step 1"
            )
        teacher = self.distillation and self.distillation.weights_hash
        check_alike({"the latest step in --workdir": start, "the weights of the teacher": teacher})
        if self.distillation is not None:
            with process_0_first() as is_first:
                if is_first and start is not None and not self.prepared.allow_change:
                    self.distillation.check_unchanged(self.workdir)
                if is_first:
                    self.distillation.record(self.workdir)
        return start, lost

    def _tracked(self, step: int) -> TrackedRun:
        workdir = self.workdir.resolve()
        return TrackedRun(
            name=workdir.name,
            project=self.training.project,
            workdir=workdir,
            config=as_json(self.experiment),
            environment=environment(),
            step=step,
        )

    def _finished(self, step: int) -> TrainingResult:
        """The result of a run that has made all its updates."""
        self.reporter.line(
            f"{self.folder} has made {step} updates, and training.steps={self.training.steps}: "
            "nothing is left to train"
        )
        if (metrics := self._recorded(step)) is None:
            self.reporter.line("its last evaluation was not recorded: evaluating")
            metrics = self._evaluated(self.checkpoints.restore(step, self.abstract))
            self.reporter.validation(step, metrics)
        if self.reporter.active and not (self.workdir / PLOT_FILE).exists():
            plot_losses(self.workdir)
        self._print_next_commands()
        return TrainingResult(step, metrics)

    def _recorded(self, step: int) -> dict[str, float] | None:
        """Return the recorded metrics of a step, read by process 0 for all; None if missing."""
        with together():
            rows = read_metrics(self.workdir) if jax.process_index() == 0 else []
        for row in json.loads(gather(json.dumps([row for row in rows if row["step"] == step]))[0]):
            if "validation/loss" in row:
                del row["step"]
                return {name.removeprefix("validation/"): x for name, x in row.items()}
        return None

    def dry_run(self) -> TrainingResult:
        """Compile, time a few updates, and report the cost of the run."""
        update = self._compiled()
        described = [*self._described(update), *self._check_memory(update)]
        state = init_sharded(self.init, self.abstract)
        batch = shard_batch(next(self._batches(0)), self.mesh)
        arguments = batch, *self._arguments(0)
        time = time_updates(update, state, arguments, self.training.steps)
        if jax.process_index() == 0:
            print("\n".join([*described, time]))
        return TrainingResult(0, {})

    def _compiled(
        self, accumulation_steps: int | None = None, model: LanguageModelConfig | None = None
    ) -> jax.stages.Compiled:
        """The update, compiled ahead of time for all steps, without allocating its arguments; with
        another number of microbatches or computation of the model to learn what they need."""
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
        of_rows = partial(jax.ShapeDtypeStruct, sharding=batch_sharding(self.mesh))
        tokens = of_rows((rows, length + 1), jnp.int32)
        is_separate = isinstance(self.data, DataConfig) and self.data.documents == "separate"
        segment_ids = tokens if is_separate else None
        labels = of_rows((rows, length), jnp.int32) if self.dataset.has_labels else None
        batch = Batch._make([tokens, of_rows((rows, length), bool), segment_ids, labels])
        constants = ()
        if self.distillation is not None:
            constants = (self.distillation.abstract_parameters(self.mesh),)
        arguments = self.learning_rates[0], self.key_data, *constants
        return step.lower(self.abstract, batch, *arguments).compile()

    def _check_memory(self, update: jax.stages.Compiled) -> list[str]:
        """Check that the devices and this host have the memory of the update, before its arguments
        are allocated, and describe the memory of the host."""
        if (memory := memory_of(update)) is None:
            return []

        def measure(accumulation_steps: int, remat: bool) -> Memory | None:
            model = dataclasses.replace(self.model, remat=remat)
            return memory_of(self._compiled(accumulation_steps, model))

        limits = Limits(self.abstract)
        setting = Setting(
            self.data.batch_size,
            self.training.accumulation_steps,
            self.mesh.shape["data"] * self.mesh.shape["fsdp"],
            self.model.remat,
        )
        check_memory(limits, memory, setting, measure)
        return [limits.describe(memory)]

    @cached_property
    def constants(self) -> tuple[nnx.State, ...]:
        """The parameters of the teacher, if any, on the devices."""
        if self.distillation is None:
            return ()
        parameters = jax.block_until_ready(self.distillation.parameters(self.mesh))
        self.distillation.release()
        return (parameters,)

    def _arguments(self, step: int) -> tuple[np.float32, np.ndarray, *tuple[nnx.State, ...]]:
        """Further arguments of the update: learning rate of a step, counted from 0, the data of the
        run's random key, and the parameters of the teacher, if any."""
        return self.learning_rates[step], self.key_data, *self.constants

    def _described(self, update: jax.stages.Compiled) -> list[str]:
        what = self.mesh, self.data, self.training, self.dataset
        warmup = describe_warmup(self.experiment.optimizer, self.training.steps)
        return [
            *describe(*what, self.count, update),
            *warmup,
            *self.prepared.settings.lines,
            *without_peak(),
        ]

    def _batches(self, start: int) -> Iterator[Batch]:
        process_index, process_count = share_of_process(self.mesh)
        return train_batches(
            self.dataset,
            self.data,
            seed=self.seed,
            start_step=start,
            process_index=process_index,
            process_count=process_count,
        )

    def _steps(self, state: TrainState, start: int, update: jax.stages.Compiled) -> TrainingResult:
        training, metrics = self.training, {}
        self.clock, self.losses = Clock(start), []
        batches = with_timeout(
            self._batches(start),
            self.dataset.name,
            timeout=training.data_timeout,
            warn=self.reporter.line,
            is_stopped=self._is_stopped_alone,
        )
        tracer = Tracer(self.workdir, start, self.prepared.profile)
        in_flight = InFlight(self._completed)
        self.requests = Requests(self.mesh, self.signals, training.checkpoint_minutes)
        for step in range(start + 1, training.steps + 1):
            tracer(step)
            if (rows := next(batches, None)) is None:  # stopped while no batch came
                in_flight.drain()
                tracer(step - 1, last=True)
                return self._stopped(step - 1, state, metrics, self.signals.first)
            state, measured = update(
                state, shard_batch(rows, self.mesh), *self._arguments(step - 1)
            )
            in_flight.add(step, measured)
            signal_number, is_due = self.requests()
            is_last, every = step == training.steps, training.checkpoint_every
            evaluates = step % training.evaluate_every == 0 or is_last
            saves = is_due or (every is not None and step % every == 0)
            if not (evaluates or saves or signal_number):
                continue
            in_flight.drain()  # a checkpoint includes its metrics
            if signal_number or is_last:
                tracer(step, last=True)
            if signal_number:
                return self._stopped(step, state, metrics, signal_number)
            if evaluates:
                is_first = not metrics  # the first evaluation includes compilation
                try:
                    with self.reporter.untimed() if is_first else contextlib.nullcontext():
                        metrics = self._evaluate_and_save(step, state)
                except _Stopped as stopped:
                    tracer(step, last=True)
                    return self._stopped(step, state, metrics, *stopped.args)
            else:
                self.checkpoints.save(step, state)
            self.requests.restart()
            self.clock.restart(step)
        return TrainingResult(training.steps, metrics)

    def _is_stopped_alone(self) -> bool:
        """Whether a run of one process got a signal. Several processes agree after each update."""
        return jax.process_count() == 1 and self.signals.first != 0

    def _stopped(
        self, step: int, state: TrainState, metrics: dict[str, float], signal_number: int
    ) -> TrainingResult:
        self.checkpoints.save(step, state)
        return TrainingResult(step, metrics, signal_number)

    def _completed(self, step: int, measured: Metrics) -> None:
        """Report a complete update, if it is one of `log_every`, with the mean loss of the updates
        since the last report that were not skipped."""
        values = {name: float(x) for name, x in measured.items()}
        if not values["consecutive_skips"]:
            self.losses.append(values["loss"])
        if step % self.training.log_every == 0 or step == self.training.steps:
            self._report(step, values)

    def _report(self, step: int, values: dict[str, float]) -> None:
        skips = int(values.pop("consecutive_skips"))
        if skips:
            self.reporter.line(
                f"warning: the last {skips} update(s) up to step {step} were skipped: loss "
                f"{values['loss']:.4g}, gradient norm {values['gradient_norm']:.4g}"
            )
        if skips >= self.training.max_consecutive_skips:
            raise Diverged(
                f"training ends at step {step}: {skips} consecutive updates were skipped, because "
                "they were not finite or their gradients exceeded training.skip_grad_norm_ratio. "
                "Try a smaller optimizer.learning_rate, or check the data near this step"
            )
        if self.losses:
            values["loss"] = math.fsum(self.losses) / len(self.losses)
        self.losses.clear()
        tokens = tokens_per_update(self.data)
        values["learning_rate"] = float(self.learning_rates[step - 1])
        values["tokens_per_second"] = rate = tokens * self.clock.steps_per_second(step)
        utilization = model_flops_utilization(rate, self.flops_per_token)
        if utilization is not None:
            values["mfu"] = utilization
        self.reporter.training(step, values)

    def _evaluate_and_save(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluate, save a checkpoint, and write a sample."""
        metrics = self._evaluated(state, self._raise_if_stopped)
        self.reporter.validation(step, metrics)
        self.checkpoints.save(step, state, loss=metrics["loss"])
        is_stopped = self.requests()[0] != 0
        if self.training.sample_tokens and not is_stopped:
            assert self.dataset.tokenizer is not None
            text = sample(
                nnx.merge(self.graph, state.weights),
                self.dataset.tokenizer,
                self.training.sample_prompt,
                self.training.sample_tokens,
                seed=self.seed,
            )
            self.reporter.sample(step, text)
        return metrics

    def _raise_if_stopped(self) -> None:
        if number := self.requests()[0]:
            raise _Stopped(number)

    def _evaluated(
        self, state: TrainState, before_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        return evaluate(
            self.evaluation_step,
            state.weights,
            self.dataset,
            self.data,
            self.mesh,
            max_batches=self.training.evaluation_batches,
            is_causal=self.model.is_causal,
            step_by_position=self.step_by_position,
            before_batch=before_batch,
        )

    def _conclude(self, result: TrainingResult) -> None:
        line = self.reporter.line
        if not self.reporter.active:
            return
        if result.signal is not None:
            name = signal.Signals(result.signal).name
            line(f"stopped by {name} after step {result.step}, which is saved in {self.folder}")
            line("to resume, give the same command again")
            return
        plot_losses(self.workdir)
        text = self.workdir / "samples" / f"step_{result.step:08d}.txt"
        if text.exists():
            line(f"\na sample:\n{text.read_text(encoding='utf-8')}\n")
        line(f"loss plot: {self.folder}/{PLOT_FILE}")
        self._print_next_commands()

    def _print_next_commands(self) -> None:
        # After attention transfer alone, a second stage follows.
        is_last = self.experiment.distillation.target != "attention"
        if is_last and self.model.is_causal and self.dataset.tokenizer is not None:
            self.reporter.line("next, generate text:")
            workdir = shlex.quote(str(self.folder))
            command = f'python -m heinsen_jax.generate --workdir {workdir} --prompt "..."'
            self.reporter.line(f"  {command}")
