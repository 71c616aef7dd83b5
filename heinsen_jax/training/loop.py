"""The training loop: from configurations to a trained model in a run's folder."""

import contextlib
import dataclasses
import json
import math
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.generate import sample
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runtime.distributed import check_alike, gather, process_0_first, together
from heinsen_jax.runtime.environment import environment
from heinsen_jax.runtime.signals import Signals
from heinsen_jax.runtime.timeouts import with_timeout
from heinsen_jax.sharding import shard_batch
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.config import as_json
from heinsen_jax.training.loss_plot import PLOT_FILE, plot_losses
from heinsen_jax.training.metrics import Reporter
from heinsen_jax.training.pacing import InFlight, Requests
from heinsen_jax.training.preflight import time_updates, tokens_per_update
from heinsen_jax.training.prepare import Prepared
from heinsen_jax.training.profiling import Clock, Tracer
from heinsen_jax.training.program import Program
from heinsen_jax.training.recorded import losses_differ, record
from heinsen_jax.training.start import check_start
from heinsen_jax.training.state import (
    TrainState,
    init_sharded,
)
from heinsen_jax.training.step import Metrics
from heinsen_jax.training.tracker_services import services
from heinsen_jax.training.trackers import TrackedRun, Tracker, Tracking
from heinsen_jax.training.utilization import model_flops_utilization


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
      signal: number of the signal that stopped training or came after the last update, or None.
    """

    step: int
    metrics: dict[str, float]
    signal: int | None = None


def train(prepared: Prepared, *, trackers: Sequence[Tracker] = ()) -> TrainingResult:
    """Train from the latest checkpoint in the run's folder, or from the start, to the last step.

    On SIGTERM, SIGHUP or SIGINT in any of the processes, save a checkpoint after the current step
    and stop. Before the first step, these signals are not handled.

    Args:
      prepared: the run, from `prepare_run`; closed at the end.
      trackers: trackers of the metrics, in addition to `training.trackers`; process 0 calls them.

    Returns:
      The last step, the metrics of the last evaluation, and the signal that stopped training.

    Raises:
      UserError: all checkpoints of the run are lost; the weights of its teacher have changed; a
        tracker cannot start; the run does not fit into memory; or a file cannot be written.
      Diverged: `max_consecutive_skips` consecutive updates were skipped.

    Examples:
      Train, or resume, and read the metrics of the last evaluation:

          result = train(prepare_run(load_config("quickstart"), "runs/quickstart"))
          result.metrics["loss"]

      Report the cost of a run only:

          train(prepare_run(load_config("quickstart"), "runs/quickstart", dry_run=True))
    """
    with prepared, jax.set_mesh(prepared.settings.mesh), prepared.folder.published():
        run = _Run(prepared, trackers)
        if prepared.modes.dry_run:
            return run.dry_run()
        prepared.begin()
        return run()


def fit_into_memory(prepared: Prepared, *, may_change: bool = True) -> str | None:
    """Check that the update of a run that begins later fits into memory; and choose the number of
    microbatches, and whether activations are recomputed, if they may change.

    Returns:
      The choice, in words; None if it fits as it is.

    Raises:
      UserError: it does not fit.
    """
    settings = prepared.settings
    with jax.set_mesh(settings.mesh):
        chosen = Program(settings).setting_that_fits(may_change=may_change)
    config, steps = settings.config, chosen.accumulation_steps
    model = dataclasses.replace(config.model, remat=chosen.remat)
    training = dataclasses.replace(config.training, accumulation_steps=steps)
    if (model, training) == (config.model, config.training):
        return None
    config = dataclasses.replace(config, model=model, training=training)
    prepared.settings = dataclasses.replace(settings, config=config)
    rows = config.data.batch_size // steps
    also = ", activations recomputed (model.remat)" if chosen.remat else ""
    return f"to fit into memory: microbatches of {rows} sequences{also}"


class _Due(NamedTuple):
    """Tasks after an update.

    Attributes:
      signal: number of the signal that stops training, or 0.
      evaluates: whether to evaluate, and save a checkpoint.
      saves: whether to save a checkpoint.
    """

    signal: int
    evaluates: bool
    saves: bool


class _Run:
    """State of one call of `train`."""

    def __init__(self, prepared: Prepared, trackers: Sequence[Tracker] = ()):
        self.prepared, self.trackers = prepared, trackers
        self.folder, self.workdir = prepared.folder, prepared.folder.files
        self.program = Program(prepared.settings)
        self.config = prepared.settings.config
        self.training = self.config.training
        self.dataset, self.mesh = prepared.settings.dataset, prepared.settings.mesh

    def __call__(self) -> TrainingResult:
        is_first = jax.process_index() == 0
        with together():
            trackers = [*services(self.training.trackers), *self.trackers] if is_first else []
            tracking = Tracking(trackers, lambda text: self.reporter.line(text))
        with tracking as self.tracking:
            result = self._train()
            # After the last save: its deadline does not include waiting for trackers.
            self.tracking.finish("finished" if result.signal is None else "stopped")
        return result

    def _train(self) -> TrainingResult:
        keep = self.training.keep_checkpoints
        with (
            contextlib.ExitStack() as signals,
            Checkpoints(self.folder, keep=keep) as self.checkpoints,
        ):
            start, warnings = self._start()
            with self._reporting(start or 0):
                for line in warnings:
                    self.reporter.line(line)
                if start is not None and start >= self.training.steps:
                    return self._finished(start)
                self._start_tracking(start or 0)
                update = self._compile()
                state = self._first_state(start)
                with together():  # all read the record before process 0 replaces it
                    differ = losses_differ(self.workdir, self.config, self.dataset)
                with together():
                    if start and differ:
                        self.checkpoints.forget_losses(start)
                    if jax.process_index() == 0:
                        record(self.workdir, self.config, self.dataset)
                    self.folder.publish()
                # Handled until the last save ends, also after an error: its deadline still holds.
                self.signals = signals.enter_context(Signals(self.training.shutdown_timeout))
                self.reporter.begin()
                result = self._steps(state, start or 0, update)
                self.checkpoints.wait()
        self._conclude(result)
        late = self.signals.first  # after the last update
        return dataclasses.replace(result, signal=result.signal or late or None)

    @contextlib.contextmanager
    def _reporting(self, start: int) -> Iterator[None]:
        """Context manager that opens the files of metrics; their errors reach all processes."""
        with contextlib.ExitStack() as files:
            with together():
                reporter = Reporter(
                    self.workdir,
                    start_step=start,
                    steps=self.training.steps,
                    log=self.tracking.log,
                )
                self.reporter = files.enter_context(reporter)
            yield

    def _start_tracking(self, start: int) -> None:
        with together():
            if jax.process_index() == 0:
                self.tracking.start(self._tracked(start))

    def _compile(self) -> jax.stages.Compiled:
        """Compile the update, describe the run, and check its memory."""
        self.reporter.line("compiling the update")
        started = time.monotonic()
        update = self.program.compile()
        self.reporter.line(f"compiled in {time.monotonic() - started:.1f} s")
        for line in [*self.program.describe(update), *self.program.check_memory(update)]:
            self.reporter.line(line)
        return update

    def _first_state(self, start: int | None) -> TrainState:
        """The state of a checkpoint, or the initial one."""
        if start is None:
            if tokens := self.program.initialization_tokens:
                self.reporter.line(f"fitting new layers to the teacher's on {tokens:,} tokens")
            return self.program.initial_state()
        self.reporter.line(f"continuing {self.folder} from step {start}")
        return self.checkpoints.restore(start, self.program.abstract)

    def _start(self) -> tuple[int | None, list[str]]:
        """The step to resume from, or None for a new run; and warnings about lost steps."""
        with together():
            lost = self.checkpoints.warnings()
            recorded = 0
            if jax.process_index() == 0:
                recorded = max((int(row["step"]) for row in read_metrics(self.workdir)), default=0)
                self.checkpoints.check_lost(
                    "bring one back, or give --restart to set the run aside and begin at step 1",
                    recorded=recorded,
                )
                self.checkpoints.record_newest(default=0)
        start = self.checkpoints.latest_step()
        if start is None and (given := self.config.distillation.start) is not None:
            with together():  # not earlier: a previous stage may have to train it first
                check_start(self.config.model, given, "distillation.start")
        lost = [f"warning: {text}: step {start} is used" for text in lost]
        if start is None and recorded:
            lost.append(
                f"warning: the run ended after step {recorded}, before its first checkpoint: it "
                "begins at step 1"
            )
        teacher = self.program.distillation and self.program.distillation.weights_hash
        check_alike({"the latest step in --workdir": start, "the weights of the teacher": teacher})
        if self.program.distillation is not None:
            with process_0_first() as is_first:
                if is_first and start is not None and not self.prepared.modes.allow_change:
                    self.program.distillation.check_unchanged(self.workdir)
                if is_first:
                    self.program.distillation.record(self.workdir)
        return start, lost

    def _tracked(self, step: int) -> TrackedRun:
        workdir = self.workdir.resolve()
        return TrackedRun(
            name=workdir.name,
            project=self.training.project,
            workdir=workdir,
            config=as_json(self.config),
            environment=environment(),
            step=step,
        )

    def _finished(self, step: int) -> TrainingResult:
        """The result of a run that has made all its updates."""
        self.reporter.line(
            f"{self.folder} has made {step} updates, and training.steps={self.training.steps}: "
            "nothing is left to train"
        )
        is_late = (metrics := self._recorded(step)) is None
        if metrics is None:
            self.reporter.line("its last evaluation was not recorded: evaluating")
            self._start_tracking(step)
            metrics = self.program.evaluate(self.checkpoints.restore(step, self.program.abstract))
            self.reporter.validation(step, metrics)
        if self.reporter.active and (is_late or not (self.workdir / PLOT_FILE).exists()):
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
        program = self.program
        update = program.compile()
        described = [*program.describe(update), *program.check_memory(update)]
        state = init_sharded(program.init, program.abstract)
        batch = shard_batch(next(program.batches(0)), self.mesh)
        arguments = batch, *program.arguments(0)
        time = time_updates(update, state, arguments, self.training.steps)
        if jax.process_index() == 0:
            print("\n".join([*described, time]))
        return TrainingResult(0, {})

    def _steps(self, state: TrainState, start: int, update: jax.stages.Compiled) -> TrainingResult:
        steps, metrics = self.training.steps, {}
        self.clock, self.losses = Clock(start), []
        self.requests = Requests(self.mesh, self.signals, self.training.checkpoint_minutes)
        batches = with_timeout(
            self.program.batches(start),
            self.dataset.name,
            timeout=self.training.data_timeout,
            warn=self.reporter.line,
            is_stopped=self._is_stopped_alone,
        )
        tracer = Tracer(self.workdir, start, self.prepared.modes.profile)
        in_flight = InFlight(self._completed)
        for step in range(start + 1, steps + 1):
            tracer(step)
            if (rows := next(batches, None)) is None:  # stopped while no batch came
                in_flight.drain()
                tracer(step - 1, last=True)
                return self._stopped(step - 1, state, metrics, self.signals.first)
            batch = shard_batch(rows, self.mesh)
            state, measured = update(state, batch, *self.program.arguments(step - 1))
            in_flight.add(step, measured)
            due = self._due(step)
            if not any(due):
                continue
            in_flight.drain()  # a checkpoint includes its metrics
            if due.signal or step == steps:
                tracer(step, last=True)
            if due.signal:
                return self._stopped(step, state, metrics, due.signal)
            if due.evaluates:
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
        return TrainingResult(steps, metrics)

    def _due(self, step: int) -> _Due:
        number, is_late = self.requests()
        every = self.training.checkpoint_every
        evaluates = step % self.training.evaluate_every == 0 or step == self.training.steps
        return _Due(number, evaluates, is_late or (every is not None and step % every == 0))

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
        since the last report that were not skipped.

        Raises:
          Diverged: too many consecutive updates were skipped.
        """
        values = {name: float(x) for name, x in measured.items()}
        skips = int(values.pop("consecutive_skips"))
        if not skips:
            self.losses.append(values["loss"])
        is_over = skips >= self.training.max_consecutive_skips
        is_reported = step % self.training.log_every == 0 or step == self.training.steps
        if skips and (is_over or is_reported):
            self.reporter.line(
                f"warning: the last {skips} update(s) up to step {step} were skipped: loss "
                f"{values['loss']:.4g}, gradient norm {values['gradient_norm']:.4g}"
            )
        if is_over:
            raise Diverged(
                f"training ends at step {step}: {skips} consecutive updates were skipped, because "
                "they were not finite or their gradients exceeded training.skip_grad_norm_ratio. "
                "Try a smaller optimizer.learning_rate, or check the data near this step"
            )
        if is_reported:
            self._report(step, values)

    def _report(self, step: int, values: dict[str, float]) -> None:
        if self.losses:
            values["loss"] = math.fsum(self.losses) / len(self.losses)
        self.losses.clear()
        tokens = tokens_per_update(self.program.data)
        values["learning_rate"] = float(self.program.learning_rates[step - 1])
        values["tokens_per_second"] = rate = tokens * self.clock.steps_per_second(step)
        flops = self.program.flops_per_token
        utilization = model_flops_utilization(rate, flops, self.program.mesh.size)
        if utilization is not None:
            values["mfu"] = utilization
        self.reporter.training(step, values)

    def _evaluate_and_save(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluate, save a checkpoint, and write a sample."""
        metrics = self.program.evaluate(state, self._raise_if_stopped)
        self.reporter.validation(step, metrics)
        self.checkpoints.save(step, state, loss=metrics["loss"])
        is_stopped = self.requests()[0] != 0
        if self.training.sample_tokens and not is_stopped:
            assert self.dataset.tokenizer is not None
            text = sample(
                nnx.merge(self.program.graph, state.weights),
                self.dataset.tokenizer,
                self.training.sample_prompt,
                self.training.sample_tokens,
                seed=self.config.seed,
            )
            self.reporter.sample(step, text)
        return metrics

    def _raise_if_stopped(self) -> None:
        if number := self.requests()[0]:
            raise _Stopped(number)

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
        is_last = self.config.distillation.target != "attention"
        if is_last and self.config.model.is_causal and self.dataset.tokenizer is not None:
            self.reporter.line("next, generate text:")
            workdir = shlex.quote(str(self.folder))
            command = f'python -m heinsen_jax.generate --workdir {workdir} --prompt "..."'
            self.reporter.line(f"  {command}")
