"""Attention with decays, gates and truncated series against results of the field's reference code.

`tests/golden/README.md` names the publication and project of each case.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from heinsen_jax.ops import (
    MLSTMState,
    dot_product_attention,
    gated_delta_rule,
    mlstm_attention,
    taylor_attention,
)

TOLERANCE = {"rtol": 0, "atol": 1e-10}

forgetting_attention = partial(dot_product_attention, is_causal=True)
forgetting_window = partial(forgetting_attention, local_window_size=7)
CASES: dict[str, Callable] = {
    "linear": gated_delta_rule,
    "retention": gated_delta_rule,
    "simple_gla": gated_delta_rule,
    "mamba2": partial(gated_delta_rule, scale=1.0),
    "gla": gated_delta_rule,
    "delta_rule": gated_delta_rule,
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule_negative": gated_delta_rule,
    "kda": gated_delta_rule,
    "gdn2": gated_delta_rule,
    "deltaproduct": partial(gated_delta_rule, num_steps=3),
    "rwkv7": gated_delta_rule,
    "mlstm": mlstm_attention,
    "mlstm_long": mlstm_attention,
    "based": partial(taylor_attention, num_terms=3),
    "taylor_5_terms": partial(taylor_attention, num_terms=5),
    "taylor_5_terms_noncausal": partial(taylor_attention, num_terms=5, is_causal=False),
    "forgetting-xla": partial(forgetting_attention, implementation="xla"),
    "forgetting-tiled": partial(forgetting_attention, implementation="tiled"),
    "forgetting_window-xla": partial(forgetting_window, implementation="xla"),
    "forgetting_window-tiled": partial(forgetting_window, implementation="tiled"),
}
"""Operators by the name of a case, after which `-` and an implementation may follow."""


def within(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def absolute(c: Any, n: Any, m: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return C and n of an mLSTM, which do not depend on the choice of the stabilizer m."""
    scale = np.exp(np.asarray(m))[..., None]
    return scale[..., None] * c, scale * n


def assert_states_equal(state: Any, arrays: Mapping[str, np.ndarray]) -> None:
    if isinstance(state, MLSTMState):
        memories = absolute(state.c, state.n, state.m)
        expected = absolute(**within(arrays, "state/"))
        for have, want in zip(memories, expected, strict=True):
            tolerance = TOLERANCE["atol"] * max(1, np.max(np.abs(want)))
            np.testing.assert_allclose(have, want, rtol=0, atol=tolerance)
    else:
        np.testing.assert_allclose(state, arrays["state"], **TOLERANCE)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_published_values_and_states(golden, name):
    attention = CASES[name]
    arrays = within(golden("recurrences"), f"{name.partition('-')[0]}/")
    has_state = any(key.split("/")[0] == "state" for key in arrays)
    inputs = {k: x for k, x in arrays.items() if k.split("/")[0] not in ("output", "state")}
    if parts := within(inputs, "initial_state/"):
        inputs = {k: x for k, x in inputs.items() if "/" not in k}
        inputs["initial_state"] = MLSTMState(**parts)
    if has_state:
        y, state = jax.jit(partial(attention, return_state=True))(**inputs)
        assert_states_equal(state, arrays)
    else:
        y = jax.jit(attention)(**inputs)
    np.testing.assert_allclose(y, arrays["output"], **TOLERANCE)
