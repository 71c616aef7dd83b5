"""Put a Colab badge and a cell that clones and installs the repository at the start of every
notebook.

    python scripts/colab_badges.py OWNER/NAME

OWNER/NAME is the repository on GitHub. Earlier badges are replaced. The installation cell does
nothing outside Colab.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
TITLE = "# %% [markdown]\n# # "  # the first cell of every notebook
CELLS = """\
# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb)

# %%
import sys

if "google.colab" in sys.modules:
    from IPython.core.getipython import get_ipython

    get_ipython().system("git clone --quiet --depth 1 https://github.com/{repository}")
    get_ipython().run_line_magic("cd", "{folder}")
    get_ipython().run_line_magic("pip", "install --quiet -e '.[notebooks]'")

"""


def add_badges(repository: str, folder: Path = NOTEBOOKS) -> None:
    """Write the two cells into the scripts of a folder, and convert them to notebooks.

    Raises:
      ValueError: the repository is not of the form OWNER/NAME, or a script has no title.
    """
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"repository={repository!r} must be of the form OWNER/NAME")
    scripts = sorted(folder.glob("*.py"))
    for script in scripts:
        before, title, rest = script.read_text().partition(TITLE)
        if not title:
            raise ValueError(f"{script}: no cell with a title; begin it with one")
        header = before.partition("# %%")[0]  # without earlier cells
        folder_name = repository.partition("/")[2]
        cells = CELLS.format(repository=repository, folder=folder_name, name=script.stem)
        script.write_text(header + cells + title + rest)
    subprocess.run([sys.executable, "-m", "jupytext", "--to", "ipynb", *scripts], check=True)


def main(repository: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OWNER/NAME")]):
    """Put a Colab badge and an installation cell at the start of every notebook."""
    add_badges(repository)


if __name__ == "__main__":
    tyro.cli(main)
