"""Hybrids in the README and docs are those of the committed studies."""

from heinsen_jax.models import LanguageModel
from heinsen_jax.study import differences_of, load_study
from tests.docs.pages import (
    README_TEXT,
    ROOT,
    STUDY_TEXT,
    difference,
    interval,
    results_by_model,
    results_of_study,
    size_in_words,
    table,
)


def test_hybrids_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/hybrids.py")
    models = {x.labels["layers"]: x.config.model for x in study.first_seed_runs()}
    results = {tuple(x.compared.values()): x for x in results_of_study("hybrids")}
    accuracy = {
        name: (
            results[name, "recall"].mean("accuracy"),
            results[name, "copying"].mean("accuracy_40"),
        )
        for name in models
    }
    lines = table("hybrids")
    assert len(lines) == len(models)
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        model = LanguageModel.abstract(models[name])
        sizes = [size_in_words(model.state_size(x)) for x in (1024, 32_768, 1_048_576)]
        assert cells == [*(f"{x:.2f}" for x in accuracy[name]), *sizes]
    recall = {name: results[name, "recall"].values("accuracy") for name in models}
    for name in ("1 of 2 softmax, first", "1 of 4 softmax, first", "softmax"):
        assert min(recall[name]) > 0.999
    said = "such models answer all queries of 8 pairs after "
    said += f"{study.base.training.steps} updates, those that end with it "
    longer = {tuple(x.compared.values()): x for x in results_of_study("hybrids_updates")}
    late = longer["1 of 4 softmax, last", "2400"].mean("accuracy")
    said += f"{accuracy['1 of 4 softmax, last'][0]:.0%} ({late:.0%} after 2400); on code, the "
    said += "former have a loss of {:.3f}, the latter {:.3f}."
    on_code = results_by_model("long_context")
    losses = (on_code[x].mean("loss") for x in ("softmax, then 3 log", "3 log, then softmax"))
    assert said.format(*losses) in README_TEXT
    for name in ("1 of 2 softmax, last", "1 of 4 softmax, last", "1 of 8 softmax, last"):
        assert abs(accuracy[name][0] - accuracy["log"][0]) < 0.03
    assert sum(x > 0.999 for x in recall["1 of 8 softmax, first"]) == 2
    with_softmax, alone = (
        "{:.0%}, {:.0%} and {:.0%}".format(*sorted(recall[name]))
        for name in ("slots, 1 of 8 softmax, last", "slots")
    )
    assert f"seeds answer {with_softmax}; without it, they answer {alone}." in STUDY_TEXT
    verdicts = {
        x.compared["layers"]: x.verdict
        for x in differences_of(study, [*results.values()])
        if x.metric == "accuracy_40" and x.compared["task"] == "copying"
    }
    assert {name for name, x in verdicts.items() if x == "worse"} == {
        "log",
        "1 of 8 softmax, first",
    }
    names = "1 of 2 softmax, last", "1 of 4 softmax, last", "log"
    two, four, alone = (longer[name, "2400"].mean("accuracy") for name in names)
    assert f"answer {two:.0%} and {four:.0%}, and log-attention alone {alone:.0%}" in STUDY_TEXT
    single = {longer["1 of 8 softmax, first", x].mean("accuracy") for x in ("800", "2400")}
    assert min(single) > 0.999
    smallest = next(iter(load_study("hybrids_updates").axes["learning_rate"]))
    assert all(longer[name, "2400"].tuned["learning_rate"] == smallest for name in names[:2])
    spreads = (f"{longer[name, '2400'].spread('accuracy'):.2f}" for name in names)
    assert "half the range of the seeds is {}, {} and {}".format(*spreads) in STUDY_TEXT
    of_text = {x.compared["model"]: x.mean("loss") for x in results_of_study("language_model")}
    said = (f"{of_text[name]:.3f}" for name in ("softmax, then 3 log", "3 log, then softmax"))
    assert "the losses are {} and {}".format(*said) in STUDY_TEXT


def test_hybrids_copy_better_with_softmax_attention_in_the_last_layer():
    results = {tuple(x.compared.values()): x for x in results_of_study("hybrids")}
    found = {}
    for number in (8, 4, 2):
        names = [f"1 of {number} softmax, {place}" for place in ("last", "first")]
        found[number] = difference("hybrids", *names, "accuracy_40", task="copying")
        last, first = (results[name, "copying"].values("accuracy_40") for name in names)
        assert (min(last) > max(first)) == (number > 2)
    eight, four = (f"by {found[n].mean:.2f}" for n in (8, 4))
    said = f"{eight} in the mean (95% confidence interval {interval(found[8])}) and {four} "
    assert f"{said}({interval(found[4])}); with one of two layers" in STUDY_TEXT
    assert found[2].verdict == "no difference"
