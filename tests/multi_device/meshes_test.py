"""Meshes of eight virtual devices: results of one device, with minimal communication."""

import json

import pytest

from heinsen_jax.attention import mechanism, names
from tests.multi_device.apart import run_apart

LINEAR = {"attention": "linear"}
# Compiles faster than others, and is split in the same way.
SCAN = {"attention": "log", "options": {"implementation": "scan"}}
AXES = "data", "fsdp", "tensor", "context"
PRODUCTS = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 4}]


def run(model: dict, wants_loss: bool, *meshes: dict[str, int]) -> list[dict]:
    arguments = map(json.dumps, (model, wants_loss, *meshes))
    return run_apart("meshes_run.py", *arguments)["meshes"]


def check(model: dict, meshes: list[dict[str, int]]) -> None:
    """Results equal those of one device, and each device stores only its part."""
    for sizes, found in zip(meshes, run(model, False, *meshes), strict=True):
        assert found["error"] < 1e-5, (sizes, found)
        parts = [2, 16 // sizes.get("fsdp", 1), 48 // sizes.get("tensor", 1)]
        assert found["moment"] == parts, "of the optimizer's state"
        limit = 1.2 if "fsdp" not in sizes else 0.1 + 1 / sizes["fsdp"]
        assert found["memory_to_begin"] < limit, "what is split is never whole"


@pytest.mark.nightly
def test_a_product_of_axes():
    check(LINEAR, [{"fsdp": 2, "tensor": 2, "context": 2}])


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["linear", "log"])
def test_packed_documents(attention):
    """Documents end inside the tokens of a device and at their borders, or span several."""
    model = {"attention": attention, "is_packed": True, "convolution_size": 3}
    (found,) = run(model, False, {"fsdp": 2, "context": 4})
    assert found["error"] < 1e-5, found


@pytest.mark.nightly
def test_every_axis_and_products_of_them():
    meshes = [{axis: size} for axis in AXES for size in (2, 4, 8)]
    check(SCAN, [*meshes, *PRODUCTS, {"data": 2, "tensor": 2, "context": 2}])


@pytest.mark.nightly
def test_devices_exchange_a_minimum():
    """Layers are one loop, with each collective operation once in its body."""
    data, context = run({"attention": "log"}, True, {"data": 4}, {"context": 4})
    assert data["collectives"]["loss"] == {"all-reduce": 1}, "of the mean"
    assert data["collectives"]["gradient"] == {"all-reduce": 2}, "of layers, of the rest"
    forward, backward = context["collectives"]["loss"], context["collectives"]["gradient"]
    assert forward["all-gather"] == 2, "one of the position recurrence, one of a layer"
    assert forward.get("all-to-all", 0) == forward.get("reduce-scatter", 0) == 0
    assert backward["all-gather"] == 2
    assert context["error"] < 1e-5


@pytest.mark.parametrize(
    "mechanisms",
    [
        ["linear", "kda"],
        pytest.param(["log_window, decay"], marks=pytest.mark.nightly),
        pytest.param(
            [x for x in names() if mechanism(x).capabilities.mergeable], marks=pytest.mark.nightly
        ),
    ],
)
def test_layers_pack_and_stream_over_devices_or_raise(mechanisms):
    found = run_apart("layers_run.py", json.dumps(mechanisms))
    for name, errors in found["errors"].items():
        assert errors["packed"] < 1e-9, (name, errors)
        assert errors["streamed"] < 1e-9, (name, errors)
    assert "SoftmaxAttention: no capability 'mergeable'" in found["refusal"]
