"""The trackers of `training.trackers`. Each needs the extra of its name."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from heinsen_jax.errors import MissingExtra, UserError, extra_module
from heinsen_jax.training.config import flat
from heinsen_jax.training.trackers import Status, TrackedRun, Tracker

MLFLOW_STATUS: dict[Status, str] = {
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}


class _Service:
    """A tracker whose name is also the name of its library and of the extra that installs it."""

    name: str

    def __init__(self):
        try:
            self._library: Any = extra_module(self.name)
        except MissingExtra as missing:
            raise UserError(f"training.trackers: {missing}") from missing


class Wandb(_Service):
    """Weights & Biases. Credentials and modes are wandb's: `wandb login`, `WANDB_MODE`."""

    name = "wandb"

    def start(self, run: TrackedRun) -> str:
        self._run = self._library.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.workdir,
            reinit="create_new",  # a run of the caller stays as it is
        )
        config = {**run.config, "environment": run.environment}
        self._run.config.update(config, allow_val_change=True)
        # wandb drops rows whose own step is smaller than an earlier one, as after a resumption.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def finish(self, status: Status) -> None:
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Trackio(_Service):
    """Trackio: local files, a Hugging Face Space (`TRACKIO_SPACE_ID`) or a server
    (`TRACKIO_SERVER_URL`)."""

    name = "trackio"

    def start(self, run: TrackedRun) -> str:
        self._run = self._library.init(
            project=run.project,
            name=run.name,
            config={**run.config, "environment": run.environment},
            resume="never" if run.id is None else "must",
            embed=False,
        )
        if run.id not in (None, self._run.id):  # Trackio resumes the newest run of a name
            self._run.finish()
            raise UserError(
                f"training.project: {run.project} has a newer run named {run.name}; rename the "
                "run's folder, or choose another project and remove tracker.json"
            )
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()


class MLflow(_Service):
    """MLflow, at `MLFLOW_TRACKING_URI`. Its parameters are the configuration at the first start,
    since MLflow does not change them; its tags are the environment at the last start."""

    name = "mlflow"

    def start(self, run: TrackedRun) -> str:
        self._client = client = self._library.MlflowClient()
        entities, parameters = self._library.entities, []
        if run.id is None:
            experiment = client.get_experiment_by_name(run.project)
            project = experiment.experiment_id if experiment else None
            project = project or client.create_experiment(run.project)
            self._id = client.create_run(project, run_name=run.name).info.run_id
            fields = flat({**run.config})
            parameters = [entities.Param(name, str(value)) for name, value in fields.items()]
        else:
            self._id = run.id
            client.update_run(self._id, status="RUNNING")
        tags = [entities.RunTag(name, str(value)) for name, value in run.environment.items()]
        client.log_batch(self._id, params=parameters, tags=tags)
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, make = int(time.time() * 1000), self._library.entities.Metric
        rows = [make(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, MLFLOW_STATUS[status])


SERVICES = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def services(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names.

    Raises:
      UserError: an extra is not installed.
    """
    return [SERVICES[name]() for name in names]
