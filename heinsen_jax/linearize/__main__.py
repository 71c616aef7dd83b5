"""Replace softmax attention of a trained model by a mechanism with a state of constant size.

python -m heinsen_jax.linearize --model runs/teacher --workdir runs/linear

New layers are first fitted to the teacher's on a few thousand tokens. Then the whole model is
trained to predict the next token and the teacher's predictions; with --transfer-steps, after
attention transfer, in which new parameters are trained to reproduce the outputs of the teacher's
layers, given the same inputs. Two further models are trained for comparison, unless --no-baselines
is given: the teacher itself, and one with windows alone. A table compares all. The runs are in the
folders WORKDIR, WORKDIR-transfer, WORKDIR-teacher and WORKDIR-window; the same command resumes
them. Microbatches are chosen so that they fit into memory.

Further options set fields of all runs, as for train.py: --training.log-every 10, --mesh.fsdp 8.
`--optimizer` options do not apply to attention transfer. On several hosts run the same command on
each: docs/pods.md.
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
