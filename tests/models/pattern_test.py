"""The pattern of attention layers: in Python, on the command line, in recorded configurations."""

import json
from dataclasses import asdict

import pydantic
import pytest

from heinsen_jax.attention import configure
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.pattern import parse_pattern, with_layers

HYBRID = (
    Layers("log", repeats=3, options={"decay": "head", "max_timescale": 64}),
    Layers("softmax", options={"positions": "rotary"}),
)
CONFIGS = pydantic.TypeAdapter(LanguageModelConfig)


def test_a_hybrid_repeats_its_layers_with_their_options():
    config = LanguageModelConfig(num_layers=8, attention=HYBRID)
    assert config.layer_pattern == ("log", "log", "log", "softmax")
    *log, softmax = config.mechanisms()
    assert [(x.decay, x.max_timescale) for x in log] == [("head", 64)] * 3
    assert softmax.positions == "rotary"


def test_options_that_are_left_out_are_those_of_the_block():
    config = LanguageModelConfig(
        block="decay",
        key_depth=8,
        use_bias=False,
        attention=("log", Layers("log", options={"decay": None, "key_depth": 16})),
    )
    by_block, changed = config.mechanisms()
    assert (by_block.decay, by_block.values, by_block.gated) == ("head", "linear", False)
    assert (changed.decay, changed.values, changed.gated) == (None, "linear", False)
    assert (by_block.key_depth, changed.key_depth) == (8, 16)
    assert not by_block.use_bias


def test_the_decay_of_a_block_is_that_of_log_attention():
    config = LanguageModelConfig(block="decay", attention="log_window")
    assert config.mechanisms()[0].decay is None


def test_mechanisms_in_parallel_have_the_options_of_the_block():
    parallel = Layers("gqa+mamba2", options={"mamba2.key_depth": 16})
    config = LanguageModelConfig(block="llama", norm_epsilon=1e-3, attention=parallel)
    parts = config.mechanisms()[0].parts
    assert (parts["gqa"].positions, parts["gqa"].use_bias) == ("rotary", False)
    assert (parts["mamba2"].key_depth, parts["mamba2"].norm_epsilon) == (16, 1e-3)
    assert len({config, LanguageModelConfig(attention="gqa+mamba2")}) == 2
    assert len({configure("gqa+mamba2"), configure("mamba2+gqa")}) == 1


NORMED = Layers("gqa", repeats=2, norm_after=True)
BOTH = Layers("gqa", norm_after="both")
ALONE = Layers("gqa", options={"num_kv_heads": 2}, has_mlp=False)


PARALLEL = Layers("gqa+mamba2", options={"gqa.scale": 0.5, "mamba2.key_depth": 64})


@pytest.mark.parametrize(
    "attention",
    ["log", HYBRID, HYBRID[1], ("log", *HYBRID), ("log", BOTH, NORMED, ALONE), PARALLEL],
)
def test_json_and_command_line_restore_a_pattern(attention):
    config = LanguageModelConfig(attention=attention, num_layers=20)
    again = CONFIGS.validate_python(json.loads(json.dumps(asdict(config))))
    assert again == config
    assert hash(again) == hash(config)
    entries = attention if isinstance(attention, tuple) else (attention,)
    assert parse_pattern([*map(str, entries)]) == attention


def test_equal_patterns_hash_alike():
    swapped = Layers("log", options={"max_timescale": 64, "decay": "head"}, repeats=3)
    assert swapped == HYBRID[0]
    assert hash(swapped) == hash(HYBRID[0])
    assert len({HYBRID[0], Layers("log", repeats=3), Layers("log")}) == 3
    assert len({NORMED, Layers("gqa", repeats=2)}) == 2
    assert len({ALONE, Layers("gqa", options={"num_kv_heads": 2})}) == 2


def test_values_on_the_command_line_have_types():
    argument = "log:window_size=None,gated=true,use_bias=False,max_timescale=1e3,num_kv_heads=2"
    layers = parse_pattern([argument])
    assert isinstance(layers, Layers)
    values = [None, True, False, 1000.0, 2]
    assert [*layers.options.values()] == values
    assert [*map(type, layers.options.values())] == [*map(type, values)]
    layers = Layers("softmax", options={"positions": "none"})
    assert parse_pattern([str(layers)]) == layers


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("log:", "log:: '' must be an option with its value, once"),
        ("log:decay", "log:decay: 'decay' must be an option with its value"),
        ("log:decay=", "'decay=' must be an option with its value"),
        ("log:decay=head,decay=head", "'decay=head' must be an option with its value, once"),
        ("log:repeats=0", "log:repeats=0: repeats: Input should be greater than 0"),
    ],
)
def test_a_damaged_argument_is_refused(argument, message):
    with pytest.raises(UserError, match=message):
        parse_pattern(["softmax", argument])


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("gqa+nope", "attention mechanism 'nope': unknown"),
        ("gqa+gqa", r"gqa\+gqa: has a mechanism twice"),
        (Layers("gqa+log", options={"scale": 1}), r"option 'scale' must begin .* write gqa\.scale"),
        (Layers("gqa+log", options={"kda.scale": 1}), r"option 'kda\.scale' must begin"),
        (Layers("gqa+log", options={"log.window_size": 0}), r"log\.window_size: Input should be"),
        ((Layers("log"), Layers("nope")), "attention mechanism 'nope': unknown"),
        (Layers("log", options={"window_sise": 3}), r"log\.window_sise: no such field; .* window_"),
        (Layers("log", options={"window_size": 0}), r"log\.window_size: Input should be greater"),
        (Layers("softmax", options={"decay": "head"}), r"softmax\.decay: no such field"),
        (Layers("log", repeats=5), "num_layers=24 is not a multiple of the 5 layers"),
        ({"mechanism": "log", "repeat": 3}, "repeat"),
        (["log", 3], "Input should be a dictionary or an instance of Layers"),
    ],
)
def test_invalid_layers_raise(attention, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        CONFIGS.validate_python({"attention": attention})


def test_recorded_options_of_earlier_versions_become_layers():
    pairs = [["log.decay", "head"], ["log.values", "linear"], ["1.decay", "feature"]]
    former = {"num_layers": 6, "attention": ["log", "log", "rmt"], "attention_options": pairs}
    config = CONFIGS.validate_python(with_layers(former))
    assert config == LanguageModelConfig(
        num_layers=6,
        attention=(
            Layers("log", options={"decay": "head", "values": "linear"}),
            Layers("log", options={"decay": "feature", "values": "linear"}),
            "rmt",
        ),
    )
    one = with_layers({"attention": "log", "attention_options": [["log.window_size", 4]]})
    assert CONFIGS.validate_python(one).attention == Layers("log", options={"window_size": 4})
    assert with_layers({"attention": "rmt", "attention_options": []}) == {"attention": "rmt"}
    with pytest.raises(ValueError, match="valid list"):
        with_layers({"attention_options": 3})
