"""Replace softmax attention of a trained model by a mechanism with a state of constant size.

python -m heinsen_jax.linearize --model runs/teacher --workdir runs/linear

Stage 1, attention transfer: each new attention layer is trained to reproduce the output of the
teacher's, given the same inputs; only parameters that the teacher does not have are trained. Stage
2: the whole model is trained to predict the next token and the teacher's predictions. The runs are
in the folders WORKDIR-transfer and WORKDIR; the same command resumes them. A table compares the
teacher and both stages.

Further options set fields of both runs, as for train.py: --training.log-every 10, --mesh.fsdp 8.
`--optimizer` options apply to stage 2 only. On several hosts run the same command on each:
docs/pods.md.
"""

from heinsen_jax import linearize as package
from heinsen_jax.errors import command_line
from heinsen_jax.linearize.plan import Options
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.arguments import parse
from heinsen_jax.runtime.signals import exit_immediately
from heinsen_jax.typing import config_dataclass


@config_dataclass
class _Command(Options):
    __doc__ = Options.__doc__

    coordinator: str | None = None
    """host:port of process 0, if no cluster is detected."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""


@command_line
def main() -> int:
    overrides: list[str] = []
    prog = "python -m heinsen_jax.linearize"
    options = parse(_Command, prog=prog, description=__doc__, unknown=overrides)
    keep_freed_memory()
    distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    with exit_immediately():
        return package.linearize(options, overrides)


if __name__ == "__main__":
    raise SystemExit(main())
