"""Examples of the README and docs run, links are valid, and tables of mechanisms are complete."""

import re
import subprocess
from pathlib import Path

import jax
import pytest

from docs.figures import STUDIES, record, render
from heinsen_jax import attention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.config import as_json, load_config, override
from heinsen_jax.models.pattern import parse_pattern, single_layers, with_layers
from heinsen_jax.training.optimizer import learning_rates
from studies import load_study, sweeps
from studies.runner import run_study

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
README_TEXT = " ".join(README.split())
MECHANISMS = (ROOT / "docs/mechanisms.md").read_text()
PAGES = "\n".join([README, *(page.read_text() for page in sorted(ROOT.glob("docs/**/*.md")))])
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGES, re.DOTALL))
SHORT = "layer", "tiny"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in qwix, of Flax
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHORT)) for name in EXAMPLES],
)
def test_examples_run(name, capsys):
    defined: dict = {}
    exec(compile(EXAMPLES[name], name, "exec"), defined)
    if name == "tiny":
        defined["get_config"]()
    elif name not in ("keywords", "data", "study", "tensor"):
        limit = {"model": 0.01, "int8": 0.01, "mesh": 0.5}.get(
            name, 1e-4
        )  # a loss, or rounding errors
        assert float(capsys.readouterr().out) < limit


def test_the_example_of_a_study_is_checked_and_reported(tmp_path):
    environment = {"cpu": "a CPU", "backend": "cpu", "device": "cpu", "jax": "1"}
    environment |= {"commit": "abc", "uncommitted_changes": False}
    metrics = {name: 0.5 for name in ("accuracy_32", "accuracy_64", "accuracy_256")}
    row = {"metrics": metrics, "parameters": 1, "state_bytes": 1, "environment": environment}
    file = tmp_path / "induction_lengths.py"
    file.write_text(EXAMPLES["study"])
    run_study(load_study(file), tmp_path, lambda runs, folder: ((run, row) for run in runs))
    assert "9 of 9 runs" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").exists()


def test_links_are_valid():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_number_of_mechanisms_is_right():
    others = len(attention.names()) - 1
    assert f"It also has {others} other attention mechanisms" in README_TEXT
    section = README.partition("## Mechanisms\n")[2].partition("\n## ")[0]
    named = re.findall(r"\[`(\w+)`\]\(https://arxiv", section)
    assert {*named} <= {*attention.names()}
    assert f"[{others + 1 - len(named)} others](" in section


def test_the_table_of_mechanisms_names_all():
    rows = MECHANISMS.partition("| name and paper | mechanism | state | |\n")[2].partition("\n\n")[
        0
    ]
    names = " ".join(row.split("|")[1] for row in rows.splitlines()[1:])
    assert sorted(re.findall(r"`(\w+)`", names)) == sorted(attention.names())


@pytest.mark.parametrize("name", attention.names())
def test_mechanisms_link_the_paper_that_their_layer_cites(name):
    cited = re.search(r"arXiv:(\d{4}\.\d{5})", attention.mechanism(name).__doc__ or "")
    cell = f"[`{name}`](https://arxiv.org/abs/{cited[1]})" if cited else f"`{name}`"
    assert cell in MECHANISMS


def test_results_that_are_not_finite_are_those_of_the_notebook(capsys):
    script = (ROOT / "notebooks/3_numbers_at_the_edge.py").read_text()
    first, last = script.index("import jax\n"), script.index("# ## The state of no tokens")
    with jax.numpy_rank_promotion("allow"):
        exec(compile(script[first:last], "notebook 3", "exec"), {})
    shown = capsys.readouterr().out.partition("rising by 1.0 nats per token\n")[2]
    simple, ours = re.findall(r"not finite: +(\d+) of 2048", shown)[:2]
    said = re.search(r"(\d+) of 2048 results that are not finite", README_TEXT)
    assert said
    assert int(said[1]) == pytest.approx(int(simple), rel=0.01)
    assert int(ours) == 0


def rows(head: str) -> list[str]:
    """Rows of the README's table with this head."""
    return README.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]


def test_the_table_of_losses_is_of_the_records():
    sizes = "'size 1024', 'size 32768'"
    metrics = "'test_loss', 'test_loss_2048'"
    losses = render(f"{{{{ code_contexts.rows({metrics}, {sizes}) }}}}").splitlines()
    shown = rows("| | loss at 512 |")
    assert len(shown) == 5
    assert {*shown} <= {*losses}
    models = [row.split(" | ")[0].removeprefix("| ") for row in shown]
    study = STUDIES["code_contexts"]
    number = min(len(study.seeds(name)) for name in models)
    stable = [name for name in models if name != "Gated DeltaNet, 1 head"]
    most, gated = (
        max(study.spread(x, metric) for metric in ("test_loss", "test_loss_2048"))
        for x in (stable, ["Gated DeltaNet, 1 head"])
    )
    said = f"{('one', 'two', 'three')[number - 1]} seeds (± up to {most:.2f}; Gated DeltaNet: "
    assert f"{said}{gated:.2f}):" in README_TEXT
    more = study.less("3 Gated DeltaNet of 1 head, then softmax", "3 log, then softmax")
    assert (
        f"With Gated DeltaNet in place of log, the hybrid's loss is {more:.2f} larger"
        in README_TEXT
    )


def test_the_cost_of_exactness_is_of_the_record():
    by_length = record("tiers")["tiers"]["log_attention"].values()
    costs = [cost for x in by_length for cost in x["times_tier_one"].values()]
    assert f"would overflow cost up to {max(costs):.1f} times as much" in README_TEXT


def test_the_table_of_speeds_is_of_the_records():
    peers = {name: record(f"comparison_{name}")["lengths"] for name in ("torch", "jla")}
    wanted = [
        [f"{peers[peer][length]['times_as_fast'][name]:.1f}" for length in ("1024", "4096")]
        for peer, name in (("torch", "original"), ("torch", "softmax"), ("jla", "jla"))
    ]
    times = {
        x["length"]: {
            way: result["seconds"]["both"]
            for way, result in x["results"].items()
            if "seconds" in result
        }
        for x in record("gpu_attention")["shapes"]
        if x.get("call", "plain") == "plain" and (x["depth"], x["dtype"]) == (64, "bfloat16")
    }
    for way in ("gpu", "chunked"):
        wanted.append([f"{times[n]['cudnn'] / times[n][way]:.2f}" for n in (1024, 8192)])
    assert [re.findall(r"\| ([\d.]+)(?= \|)", row) for row in rows("| speed-up over |")] == wanted


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char_cpu"])
def test_records_of_configurations_are_of_their_fields(name):
    now = as_json(load_config(name))
    for part in ("model", "data", "optimizer", "training"):  # newer fields have no effect
        fields = with_layers(record(name)["config"][part])
        assert fields == {field: now[part][field] for field in fields}


def test_the_table_of_sizes_has_all_layers_with_a_matrix_state():
    kinds = {name: attention.mechanism(name) for name in attention.names()}
    needed = {name for name, kind in kinds.items() if issubclass(kind, MatrixStateAttention)}
    assert needed
    assert needed <= {*re.findall(r"\{\{ layer_size\('(\w+)'\) \}\}", PAGES)}


def test_slots_are_those_of_the_studies():
    text = PAGES.partition("<!-- slots -->\n```\n")[2]
    (layer,) = single_layers(parse_pattern([text.splitlines()[0]]))
    assert (layer.mechanism, dict(layer.options)) == ("log", sweeps.SLOTS)


def test_commands_of_the_full_size_are_accepted():
    """Bash prints the commands of the plan, since `python` is a function that prints."""
    steps = re.findall(r"```bash\n(.*?)```", PAGES.partition("<!-- plan -->")[2], re.DOTALL)[:3]
    plan = "".join(steps)
    script = f'python() {{ echo "$@"; }}\n{plan}'
    printed = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    commands = [line.split() for line in printed.stdout.splitlines()]
    folders = []
    for program, _, config, _, folder, *fields in (x for x in commands if x[0] != "-m"):
        assert (ROOT / program).exists()
        chosen = override(load_config(ROOT / config), fields)
        assert len(learning_rates(chosen.optimizer, chosen.training.steps))
        folders.append(folder)
    assert len(folders) == len({*folders}) == 8
    evaluated = [x for x in commands if x[0] == "-m"]
    assert [x[:3] for x in evaluated] == [["-m", "heinsen_jax.evaluate", "--workdir"]] * 2
    assert [x[3] for x in evaluated] == [x for x in folders if x.endswith("-full")]


def test_the_readme_is_short():
    assert len(README.split()) <= 1000
    assert all(len(line) <= 120 for line in README.splitlines())


def test_examples_exist():
    needed = {"layer", "nnx", "linen", "data", "state", "keywords", "mechanism"}
    needed |= {"flax_nnx", "flax_linen", "tiny", "mesh", "tensor"}
    assert needed <= set(EXAMPLES)


def test_documented_failures_name_their_tests():
    """Every row of the table names existing tests."""
    section = (ROOT / "docs/pods.md").read_text().split("## Failures and recovery\n")[1]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "**" not in row]
    assert len(rows) > 20
    for row in rows[1:]:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), test
