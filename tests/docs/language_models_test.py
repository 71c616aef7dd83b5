"""Losses of language models in the README and docs are those of the committed studies."""

import re

import pytest

from heinsen_jax.study import PowerLawPlot, adjusted_p_values, differences_of, load_study
from heinsen_jax.study.power_law import Fit
from heinsen_jax.study.report import paragraphs
from heinsen_jax.study.results import RESULTS_FILE, Recorded
from heinsen_jax.study.schedule import schedule
from tests.docs.pages import (
    README_TEXT,
    ROOT,
    STUDIES,
    STUDY_TEXT,
    results_by_model,
    results_of_study,
    table,
)


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_reports_of_studies_are_of_their_results(folder):
    study = load_study(ROOT / f"configs/studies/{folder.name}.py")
    recorded = Recorded(folder / RESULTS_FILE, read_only=True)
    records = [recorded.of(run) for runs in schedule(study, recorded) for run in runs]
    now = paragraphs(study, results_of_study(folder.name), records)
    assert (folder / "report.md").read_text().strip() == "\n\n".join(now).strip()
    assert (folder / "report.png").exists() == bool(study.plots)


def test_language_models_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/language_model.py")
    results = results_by_model("language_model")
    differences = {
        (x.compared["model"], x.metric): x for x in differences_of(study, [*results.values()])
    }
    verdicts = {key: x.verdict for key, x in differences.items()}
    for line, (name, result) in zip(table("language model"), results.items(), strict=True):
        assert result.mean("parameters") <= 850_000
        cells = [name, f"{result.mean('parameters'):,.0f}"]
        for metric in ("loss", "loss_256", "loss_1024"):
            mean, spread = result.mean(metric), result.spread(metric)
            cells.append(f"{mean:.3f} ± {spread:.3f}" if result.values(metric) else "")
        cells += [verdicts.get((name, metric), "") for metric in ("loss", "loss_1024")]
        assert line == f"| {' | '.join(cells)} |"
    ours = results["log, decay by head"].mean("loss")
    assert ours < 1.56
    worse = "softmax, no positions", "softmax, learned positions", "softmax, ALiBi", "FoX"
    others = "softmax, rotary", "Gated DeltaNet", "Mamba-2"
    hybrids = [name for name in results if "3 log" in name or "alternating" in name]
    assert {verdicts[name, "loss"] for name in worse} == {"worse"}
    assert {verdicts[name, "loss"] for name in (*others, *hybrids)} == {"no difference"}
    added = [differences[name, "loss"].mean for name in worse]
    assert f"by {min(added):.3f} to {max(added):.3f} nats" in STUDY_TEXT
    p_values = adjusted_p_values([*differences.values()], "loss")
    differ = {name for (name,), p in p_values.items() if p < 0.05}
    assert f"Holm's correction for the {len(p_values)} comparisons" in STUDY_TEXT
    assert {name for name in differ if "the paper's model" not in name} == {
        "AdamW: log, decay by head",
        "AdamW: softmax, rotary",
    }
    with_both = [name for name in results if f"AdamW: {name}" in results]
    saved = [results[f"AdamW: {x}"].mean("loss") - results[x].mean("loss") for x in with_both]
    assert f"by {min(saved):.2f} to {max(saved):.2f} nats" in STUDY_TEXT
    slots = [differences["log, slots", metric].mean for metric in ("loss", "loss_1024")]
    assert "by {:.3f} at the trained length and by {:.3f} on sequences".format(*slots) in STUDY_TEXT
    longer = adjusted_p_values([*differences.values()], "loss_1024")
    assert longer["log, slots",] < 0.05 < p_values["log, slots",]
    paper = (results[f"{x}log, the paper's model"].mean("loss_1024") for x in ("AdamW: ", ""))
    assert "from {:.3f} to {:.3f}".format(*paper) in STUDY_TEXT
    at_1024 = {name: x.mean("loss_1024") for name, x in results.items() if x.values("loss_1024")}
    best, second = sorted(at_1024, key=lambda name: at_1024[name])[:2]
    assert (best, second) == ("Mamba-2", "log, decay by head")
    assert min(results["softmax, rotary"].values("loss_1024")) > at_1024[second] + 0.1
    longer = {name for name in results if verdicts.get((name, "loss_1024")) == "worse"}
    assert {x for x in longer if not x.startswith("AdamW")} == {
        *("FoX", "softmax, ALiBi", "softmax, no positions", "3 log, then FoX"),
        *("log, slots", "log, the paper's model"),
    }
    window = "window of 64, rotary"
    gained = [results[name].mean("loss") - at_1024[name] for name in (second, window)]
    assert {f"{x:.2f}" for x in gained} == {"0.04"}


def test_the_headline_is_of_seeds_that_selected_nothing():
    study = load_study(ROOT / "configs/studies/language_model_seeds.py")
    results = results_by_model("language_model_seeds")
    ours, *others = results
    assert {len(x.values("loss")) for x in results.values()} == {5}
    selected = results_by_model("language_model")
    rates = load_study("language_model").axes["learning_rate"]
    for name, fields in study.axes["model"].items():
        assert rates[selected[name].tuned["learning_rate"]].items() <= fields.items()
    at_1024 = {name: x.mean("loss_1024") for name, x in results.items() if x.values("loss_1024")}
    assert min(at_1024, key=lambda name: at_1024[name]) == ours
    found = differences_of(study, [*results.values()])
    worse = {"loss": ("Gated DeltaNet", "softmax, ALiBi", "softmax, learned positions")}
    worse["loss_1024"] = "Gated DeltaNet", "softmax, ALiBi", "softmax, rotary"
    same = {"FoX", "Mamba-2", "window of 64, rotary"}
    assert at_1024.keys() == {ours, *worse["loss_1024"], *same}

    without_correction = {
        x.compared["model"]: x for x in found if x.metric == "loss_1024" and x.verdict == "worse"
    }
    (more,) = without_correction.keys() - {*worse["loss_1024"]}
    assert more == "window of 64, rotary"
    assert f"worse at 1024, too, by {without_correction[more].mean:.3f}." in STUDY_TEXT

    def words(name: str) -> str:
        return name.removeprefix("softmax, ").replace("rotary", "rotary positions")

    for metric, names in worse.items():
        of_metric = {x.compared["model"]: x for x in found if x.metric == metric}
        p_values = adjusted_p_values(found, metric)
        assert {name for (name,), p in p_values.items() if p < 0.05} == {*names}
        first, second, third = (f"{words(x)} (by {of_metric[x].mean:.3f})" for x in names)
        assert f"smaller than those of {first}, {second} and {third}" in STUDY_TEXT

    def named(*names: str) -> str:
        with_losses = [f"{words(name)} ({results[name].mean('loss'):.3f})" for name in names]
        return f"{', '.join(with_losses[:-1])} and {with_losses[-1]}"

    equal = "softmax, rotary", "FoX", "Mamba-2"
    better = "softmax, ALiBi", "softmax, learned positions", "Gated DeltaNet"
    assert {*better} == {*worse["loss"]}
    assert {*better, *equal} == {*others} - {"window of 64, rotary"}
    paper = results_by_model("language_model")["log, the paper's model"].mean("loss")
    said = f"reaches {results[ours].mean('loss'):.3f} nats per character over five new seeds (the "
    said += f"paper's model {paper:.3f}, over three): after Holm's correction at 5%, better than "
    said += f"{named(*better)}, with no difference from {named(*equal)}. At 16 times "
    said += f"the trained length ({at_1024[ours]:.3f}), FoX, Mamba-2 and windows show no "
    said += "difference."
    assert said in README_TEXT


def test_scaling_is_that_of_the_study():
    study, results = load_study("scaling"), results_of_study("scaling")
    assert {len(x.values("loss")) for x in results} == {2}
    rates = [*study.axes["learning_rate"]]
    assert {rates.index(x.tuned["learning_rate"]) for x in results} <= {*range(1, len(rates) - 1)}
    plots = [plot for plot in study.plots if isinstance(plot, PowerLawPlot)]
    fits = {plot.x: plot.fits(results) for plot in plots}
    differences = {plot.x: plot.differences(results, "log, decay by head") for plot in plots}
    models = [*study.axes["model"]]
    for line, name in zip(table("scaling"), models, strict=True):
        cells = [name]
        for x in ("parameters", "tokens"):
            found = fits[x][name], differences[x].get(name)
            cells += ["" if fit is None else exponent_in_words(fit) for fit in found]
        assert line == f"| {' | '.join(cells)} |"
    low, high = (f([fit.exponent for fit in fits["parameters"].values()]) for f in (min, max))
    assert f"all three are between {low:.3f} and {high:.3f}" in STUDY_TEXT
    sizes = [x.mean("parameters") / 1e6 for x in results]
    assert f"{min(sizes):.2f} to {max(sizes):.2f} million parameters" in STUDY_TEXT
    for fit in differences["parameters"].values():
        assert fit.interval[0] < 0 < fit.interval[1]
    assert differences["tokens"]["softmax, rotary"].interval[0] > 0
    assert differences["tokens"]["Gated DeltaNet"].interval[1] < 0
    loss = {tuple(x.compared.values()): x.mean("loss") for x in results}
    shortest, longest = (
        [loss[name, f"width 128, {updates} updates"] for name in (models[1], models[0], models[2])]
        for updates in (125, 2000)
    )
    assert (max(shortest), min(longest)) == (shortest[0], longest[0])
    said = "softmax attention has the largest loss of the three, {:.3f} against {:.3f} and {:.3f};"
    assert said.format(*shortest) in STUDY_TEXT
    said = "after 2000, the smallest, {:.3f} against {:.3f} and {:.3f}."
    assert said.format(*longest) in STUDY_TEXT


def exponent_in_words(fit: Fit) -> str:
    exponent, low, high = (round(x, 3) + 0.0 for x in (fit.exponent, *fit.interval))  # no -0
    return f"{exponent:.3f} [{low:.3f}, {high:.3f}]"


def test_the_page_names_the_studies_without_slots_and_with_taylor_attention():
    studies = {x.name for x in STUDIES if not x.name.startswith("linearize")}

    def studies_with(word: str) -> set[str]:
        compared = {name: results_of_study(name) for name in studies}
        return {
            name
            for name, results in compared.items()
            if any(word in label for x in results for label in x.compared.values())
        }

    listed = STUDY_TEXT.partition("log-attention with slots is not in ")[2].partition(";")[0]
    assert {*re.findall("`(.+?)`", listed)} == studies - studies_with("slots")
    assert studies_with("Taylor") == {"recall", "recall_capacity"}
