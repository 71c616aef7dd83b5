"""Inputs on which exponentials overflow, underflow or yield 0 / 0."""

from collections.abc import Callable

import numpy as np

from heinsen_jax.ops import LogAttentionState
from tests.ops.log_attention.cases import Case, Inputs, random_inputs

CASE = Case(129, num_heads=2, key_depth=4, value_depth=2, has_state=True)
TOKENS = np.arange(CASE.length, dtype=np.float32)[:, None, None]
INF = float("inf")


def base(has_state: bool = False, seed: int = 0) -> Inputs:
    inputs = random_inputs(CASE, seed)
    empty = LogAttentionState.empty((), CASE.num_kv_heads, CASE.key_depth, CASE.value_depth)
    return inputs if has_state else inputs._replace(state=empty)


def ramp(name: str, slope: float) -> Inputs:
    inputs = base()
    return inputs._replace(**{name: getattr(inputs, name) + np.float32(slope) * TOKENS})


def put(name: str, where, value: float, has_state: bool = False) -> Inputs:
    inputs = base(has_state)
    array = getattr(inputs, name).copy()
    array[where] = value
    return inputs._replace(**{name: array})


def fill(value: float, has_state: bool = False) -> Inputs:
    inputs = base(has_state)
    return Inputs(*(np.full_like(x, value) for x in inputs[:3]), state=inputs.state)


def one_hot(size: float) -> Inputs:
    inputs = base()
    hot = np.arange(CASE.key_depth) == TOKENS % CASE.key_depth
    sign = np.where(TOKENS % 2 == 0, 1, -1).astype(np.float32)
    key = np.float32(size) * hot.astype(np.float32)
    value = np.broadcast_to(np.float32(size) * sign, inputs.value.shape).copy()
    query = np.broadcast_to(key, inputs.query.shape)[::-1].copy()
    return Inputs(query, key, value, inputs.state)


def scaled(size: float) -> Inputs:
    inputs = base()
    return Inputs(*(np.float32(size) * x for x in inputs[:3]), state=inputs.state)


def some(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).uniform(size=CASE.length) < 0.4


LATE = slice(70, None)  # from the middle of the second chunk on
EARLY = slice(0, 70)

FINITE: dict[str, Callable[[], Inputs]] = {
    **{
        f"{name} {slope:+d} per token": lambda name=name, slope=slope: ramp(name, slope)
        for name in ("query", "key", "value")
        for slope in (1, -1, 10, -10)
    },
    **{
        f"one {name} feature jumps by {jump:+.0e}": (
            lambda name=name, jump=jump: put(name, (LATE, slice(None), 1), jump)
        )
        for name in ("query", "key", "value")
        for jump in (1e4, -1e4)
    },
    "one token's key stands out": lambda: put("key", 40, 1e4),
    "one token's key is out of sight": lambda: put("key", 40, -1e4),
    "keys far below the state": lambda: put("key", slice(None), -1e4, has_state=True),
    "keys far above the state": lambda: put("key", slice(None), 1e4, has_state=True),
    "log-values far below the state": lambda: put("value", slice(None), -1e4, has_state=True),
    "subnormal": lambda: fill(1e-40),
    "zero": lambda: fill(0),
    "constant": lambda: fill(7),
    "constant after a state": lambda: fill(7, has_state=True),
    "one-hot": lambda: one_hot(1e4),
    "keys 50 apart": lambda: put("key", slice(None, None, 2), 50),
    "log-values 80 apart": lambda: put("value", slice(None, None, 2), -80),
    "log-values 80 apart, keys rise 80": lambda: put("value", slice(None, None, 2), -80)._replace(
        key=ramp("key", 80 / 64).key
    ),
    **{
        f"keys rise, features {nats} apart": lambda nats=nats: apart(ramp("key", 10), nats)
        for nats in (55, 75)
    },
    "std 1000": lambda: scaled(1000),
    "std 1e30": lambda: scaled(1e30),
}

MASKED: dict[str, Callable[[], Inputs]] = {
    "some keys": lambda: put("key", some(), -INF),
    "leading keys": lambda: put("key", EARLY, -INF),
    "first key": lambda: put("key", 0, -INF),
    "last keys": lambda: put("key", LATE, -INF),
    "all keys": lambda: put("key", slice(None), -INF),
    "all keys, with a state": lambda: put("key", slice(None), -INF, has_state=True),
    "one key feature": lambda: put("key", (slice(None), slice(None), 1), -INF),
    "one key feature at first": lambda: put("key", (EARLY, slice(None), 1), -INF),
    "some values": lambda: put("value", some(), -INF),
    "leading values": lambda: put("value", EARLY, -INF),
    "one value feature": lambda: put("value", (slice(None), slice(None), 1), -INF),
    "all values": lambda: put("value", slice(None), -INF),
    "all values, with a state": lambda: put("value", slice(None), -INF, has_state=True),
    "keys and values": lambda: put("key", some(3), -INF)._replace(
        value=put("value", some(4), -INF).value
    ),
    "one query feature": lambda: put("query", (slice(None), slice(None), 1), -INF),
    "some queries": lambda: put("query", some(), -INF),
}


def apart(inputs: Inputs, nats: float) -> Inputs:
    """Lower different features of queries and keys: no product of exponentials relative to the
    largest of a row is then above exp(-nats)."""
    lower = np.float32(nats) * (np.arange(CASE.key_depth) % 2).astype(np.float32)
    upper = np.float32(nats) - lower
    return inputs._replace(query=inputs.query - lower, key=inputs.key - upper)


def values(sizes, signs=True, zeros=0.0) -> Inputs:
    inputs = base()
    rng = np.random.default_rng(5)
    value = rng.uniform(0.5, 2, inputs.value.shape)
    if signs:
        value *= rng.choice([-1, 1], value.shape)
    value[rng.uniform(size=value.shape) < zeros] = 0
    sizes = np.broadcast_to(np.asarray(sizes, np.float64), (CASE.length,))
    return inputs._replace(value=(value * sizes[:, None, None]).astype(np.float32))


FIRST_HALF = np.arange(CASE.length) < 40
VALUES: dict[str, Callable[[], Inputs]] = {
    "one": lambda: values(1),
    "1e-30": lambda: values(1e-30),
    "1e30": lambda: values(1e30),
    "1e37": lambda: values(1e37),
    "positive": lambda: values(1, signs=False),
    "zeros": lambda: values(1, zeros=0.5),
    "all zero": lambda: values(0),
    "1e-30, then 1e30": lambda: values(np.where(FIRST_HALF, 1e-30, 1e30)),
    "1e30, then 1e-30": lambda: values(np.where(FIRST_HALF, 1e30, 1e-30)),
    "1e-30, then 1e20": lambda: values(np.where(FIRST_HALF, 1e-30, 1e20)),
    "1e-30, then 1": lambda: values(np.where(FIRST_HALF, 1e-30, 1)),
    "alternating 1e30, 1e-30": lambda: values(np.where(np.arange(CASE.length) % 2, 1e-30, 1e30)),
    "keys rise": lambda: values(1)._replace(key=ramp("key", 10).key),
    "keys rise, values 1e30": lambda: values(1e30)._replace(key=ramp("key", 10).key),
    "keys rise a little, values 1e20": lambda: values(1e20)._replace(key=ramp("key", 0.3).key),
    "keys rise by 50 in a chunk": lambda: values(1)._replace(key=ramp("key", 0.8).key),
    **{
        f"keys rise, features {nats} apart, values {size:.0e}": lambda nats=nats, size=size: apart(
            values(size)._replace(key=ramp("key", 1).key), nats
        )
        for nats, size in ((10, 1e37), (35, 1e30), (42, 1e20), (55, 1e20))
    },
    "keys fall": lambda: values(1)._replace(key=ramp("key", -10).key),
    "masked keys": lambda: values(1)._replace(key=MASKED["leading keys"]().key),
    "no keys": lambda: values(1)._replace(key=MASKED["all keys"]().key),
    "masked queries": lambda: values(1)._replace(query=MASKED["some queries"]().query),
}


def size_of(inputs: Inputs) -> float:
    return largest(*inputs[:3])


def largest(*arrays: np.ndarray) -> float:
    return max(float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) for x in arrays)
