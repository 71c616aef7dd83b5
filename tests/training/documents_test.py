"""Separate documents: the choice, its report, and the losses of training and evaluation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig, LanguageModelConfig
from heinsen_jax.errors import UserError
from heinsen_jax.models import Layers
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.objectives.evaluation import make_evaluation_step
from heinsen_jax.training import prepare_run, train
from heinsen_jax.training.settings import _check_split, resolve_settings
from tests.models.small import random_model
from tests.training.conftest import WORDS


@pytest.fixture(scope="module")
def config(small, tmp_path_factory) -> ExperimentConfig:
    """Hundreds of documents of 1 to 12 words."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("corpus")
    for index in range(300):
        words = " ".join(rng.choice(WORDS, rng.integers(1, 13)))
        (folder / f"{index:03d}.txt").write_text(words)
    changed = replace(small.data, corpus=str(folder), validation_fraction=0.1)
    training = replace(small.training, steps=6, evaluate_every=6, sample_tokens=0)
    return replace(small, data=changed, training=training)


@pytest.fixture(scope="module")
def dataset(config) -> data.TokenDataset:
    return data.load(config.data)


def model_of(*attention: str, **options: str) -> LanguageModelConfig:
    sizes = {"model_dim": 16, "num_heads": 2, "num_layers": len(attention), "vocab_size": 264}
    first, *others = attention
    return LanguageModelConfig(attention=(Layers(first, options=options), *others), **sizes)


def test_the_default_depends_on_the_corpus_and_the_mechanisms(config, dataset, small):
    def said(model: LanguageModelConfig, of=dataset, settings=config.data) -> list[str]:
        return resolve_documents(settings, of, model)[1]

    assert said(model_of("linear")) == ["documents: separate"]
    assert said(model_of("block_sparse", pattern="local")) == ["documents: separate"]
    reason = ", since 'tglobal' does not support segments"
    assert said(model_of("linear", "tglobal")) == ["documents: continuous" + reason]
    reason = ", since no end-of-text token divides the corpus"
    text = said(model_of("linear"), data.load(small.data), small.data)
    assert text == ["documents: continuous" + reason]
    chosen = replace(config.data, documents="continuous")
    assert said(model_of("linear"), settings=chosen) == ["documents: continuous"]
    task = data.Recall()
    assert resolve_documents(task, data.load(task), model_of("linear")) == (task, [])


@pytest.mark.parametrize("field", [{"documents": "separate"}, {"packing": "best_fit"}])
def test_a_mechanism_without_segments_is_refused(config, dataset, field):
    ((name, value),) = field.items()
    wrong = replace(config, data=replace(config.data, **field), model=model_of("rmt"))
    message = rf"data\.{name}={value}: model\.attention='rmt', as configured, does not support "
    with pytest.raises(UserError, match=message + r"segments; set .* one of log, softmax, "):
        resolve_settings(wrong, dataset)


@pytest.mark.usefixtures("unchecked")  # for a stand-in of a mesh
def test_split_sequences_of_a_bidirectional_model_are_refused(config):
    model = LanguageModelConfig(attention="linear", is_causal=False, num_layers=1)
    separate = replace(config.data, documents="separate")
    with pytest.raises(UserError, match=r"mesh\.context=2: documents .*documents=continuous"):
        _check_split(model, separate, SimpleNamespace(shape={"tensor": 1, "context": 2}))


def test_the_loss_is_that_of_each_document_alone(config, dataset):
    """In rows that begin inside documents, with padding in the last one."""
    model = random_model(config.model)
    settings, _ = resolve_documents(config.data, dataset, config.model)
    rows = dataset.held_out_rows(settings)[""]
    batch = jax.tree.map(lambda *x: np.stack(x), rows[1], rows[len(rows) - 1])
    graph, parameters = nnx.split(model)
    total, _, count = make_evaluation_step(graph)(parameters, batch, 0)

    @jax.jit
    def losses(tokens):
        log_p = jax.nn.log_softmax(nnx.merge(graph, parameters)(tokens[:-1]))
        return -jnp.take_along_axis(log_p, tokens[1:, None], -1)[:, 0]

    expected, predictions = 0.0, 0
    end, length = dataset.tokenizer.end_of_text_id, config.data.sequence_length
    source, last = dataset.split("validation"), len(rows) - 1
    for number in (1, last):
        tokens = source.read(0, number * length, length + 1)
        for part in np.split(tokens, np.flatnonzero(tokens == end) + 1):
            if len(part) > 1:
                padded = np.pad(part, (0, length + 1 - len(part)))
                expected += float(np.sum(losses(padded)[: len(part) - 1]))
                predictions += len(part) - 1
    assert int(count) == predictions
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_run_reports_and_separates_documents(config, dataset, packing, tmp_path: Path, capsys):
    packed = replace(config.data, packing=packing)
    training = replace(config.training, accumulation_steps=2)
    result = train(
        prepare_run(replace(config, data=packed, training=training), tmp_path, dataset=dataset)
    )
    assert np.isfinite(result.metrics["loss"])
    out = capsys.readouterr().out
    assert "documents: separate" in out
    padding = f"packing: best_fit, with {dataset.plan(32).padding:.2%} padding"
    assert (padding in out) == (packing == "best_fit")
