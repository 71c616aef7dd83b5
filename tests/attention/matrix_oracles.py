"""Oracles of mechanisms whose state is a matrix per head: published recurrences, token by token.

In NumPy's float64, without code of the package; see `oracles.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def rms(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def unit(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def convolve(p: Any, name: str, x: Array) -> Array:
    """y_t = b + sum_i w_i x_(t - size + 1 + i), with zeros before the first token."""
    taps = p[f"{name}.taps"]
    y = np.zeros_like(x)
    for t in range(len(x)):
        for i, tap in enumerate(taps):
            if (s := t - len(taps) + 1 + i) >= 0:
                y[t] += tap * x[s]
    return y + p.get(f"{name}.bias", 0)


def times(layer: Any, name: str) -> float:
    return getattr(layer.config, f"{name}_multiplier", 1.0)


def projected(layer: Any, p: Any, x: Array) -> list[Array]:
    """Queries, keys and values of all heads, convolved and followed by SiLU, if so configured."""
    arrays = [times(layer, name) * x @ p[f"{name}.kernel"] for name in ("query", "key", "value")]
    if not hasattr(layer.config, "convolution_size"):
        return arrays
    if layer.config.convolution_size:
        arrays = [convolve(p, f"convolutions.{index}", x) for index, x in enumerate(arrays)]
    return [silu(x) for x in arrays]


def split(layer: Any, x: Array) -> Array:
    """`[T, N F]` -> `[N, T, F]`"""
    return np.stack(np.split(x, layer.num_heads, axis=1))


def recurrence(
    query: Array, key: Array, value: Array, decay: Array, erase: Array, scale: float
) -> Array:
    """S_t = (I - b_t k_t k_t^T) Diag(decay_t) S_(t-1) + k_t v_t^T,  o_t = scale S_t^T q_t, for one
    head, with decay `[T, K]` or `[T, 1]` and b `[T]`."""
    state, y = np.zeros((key.shape[1], value.shape[1])), []
    for q, k, v, a, b in zip(query, key, value, decay, erase, strict=True):
        state = a[:, None] * state
        state = state - b * np.outer(k, k @ state) + np.outer(k, v)
        y.append(scale * q @ state)
    return np.stack(y)


def output(
    layer: Any, p: Any, x: Array, y: list[Array], gate: Callable[[Array], Array] | None
) -> Array:
    """(rms(o) * gate(x Wg)) Wo, with a norm of each head; options replace the published gate."""
    normed = np.concatenate([rms(o, p["norm.scale"]) for o in y], 1)
    kind, chosen = layer.config.output_gate, layer.config.gate_activation
    if gate is not None or kind is not None:
        activation = {"silu": silu, "sigmoid": sigmoid}.get(chosen, gate or silu)
        factors = activation(x @ p["gate.kernel"])
        factors = np.repeat(factors, layer.value_depth, 1) if kind == "head" else factors
        normed = normed * factors
    return normed @ p["output.kernel"]


def retnet(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """sum_s gamma^(t - s) (q_t . k_s) v_s / sqrt(K), with rotary q and k."""
    assert is_causal
    y = []
    for head, (query, key, value) in enumerate(zip(*heads_of(layer, p, x), strict=True)):
        behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]
        gamma = 1 - 2.0 ** (-5 - head)
        weights = np.where(behind >= 0, gamma ** np.maximum(behind, 0), 0)
        scores = rotated(query) @ rotated(key).T / math.sqrt(layer.key_depth)
        y.append((weights * scores) @ value)
    return output(layer, p, x, y, silu)


def rotated(x: Array) -> Array:
    length, depth = x.shape
    angles = np.arange(length)[:, None] * 10000.0 ** (-2 * np.arange(depth // 2) / depth)
    y = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack([y.real, y.imag], 2).reshape(length, depth)


def heads_of(layer: Any, p: Any, x: Array) -> list[Array]:
    query, key, value = projected(layer, p, x)
    shared = layer.num_heads // layer.num_key_heads
    keys = (np.stack(np.split(x, layer.num_key_heads, axis=1)) for x in (query, key))
    return [*(np.repeat(x, shared, 0) for x in keys), split(layer, value)]


def gla(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """alpha = sigmoid(x Wf Wf' + b)^(1/16)"""
    assert is_causal
    logits = x @ p["decay.down.kernel"] @ p["decay.up.kernel"] + p["decay.up.bias"]
    decay = split(layer, sigmoid(logits) ** (1 / 16))
    nothing, scale = np.zeros(len(x)), layer.key_depth**-0.5
    y = [
        recurrence(q, k, v, a, nothing, scale)
        for q, k, v, a in zip(*heads_of(layer, p, x), decay, strict=True)
    ]
    return output(layer, p, x, y, silu)


def hgrn2(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """f = l + (1 - l) sigmoid(x Wf), keys 1 - f, and one norm for all heads."""
    assert is_causal
    bound = sigmoid(p["bound"]) if layer.config.lower_bound else 0
    forget = split(layer, bound + (1 - bound) * sigmoid(x @ p["key.kernel"]))
    query, value = (split(layer, x @ p[f"{name}.kernel"]) for name in ("query", "value"))
    nothing, scale = np.zeros(len(x)), layer.key_depth**-0.5
    y = [
        recurrence(silu(q), 1 - f, v, f, nothing, scale)
        for q, f, v in zip(query, forget, value, strict=True)
    ]
    return rms(np.concatenate(y, 1), p["norm.scale"]) @ p["output.kernel"]


def mamba2(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """h_t = exp(A dt) h_(t-1) + dt B x, y = C h + D x, with B and C of the heads of a group."""
    assert is_causal
    groups = layer.config.num_key_heads
    arrays = projected(layer, p, x)
    c, b = (np.split(array, groups, axis=1) for array in arrays[:2])
    step = softplus(times(layer, "step") * x @ p["step.kernel"] + p["to_log_decay.bias"])
    decay = np.exp(-np.exp(p["to_log_decay.log_rate"]) * step)
    y = []
    for head, v in enumerate(split(layer, arrays[2])):
        group = head * groups // layer.num_heads
        written = step[:, head, None] * v
        o = recurrence(c[group], b[group], written, decay[:, head, None], np.zeros(len(x)), 1.0)
        y.append(o + p["skip"][head] * v)
    y, gate = np.concatenate(y, 1), silu(times(layer, "gate") * x @ p["gate.kernel"])
    place = layer.config.output_norm
    y = y * gate if place == "after_gate" else y
    if place != "none":
        ones = np.ones(y.shape[1] // groups)
        normed = [rms(part, ones) for part in np.split(y, groups, axis=1)]
        y = np.concatenate(normed, 1) * p["norm.scale"]
    y = y if place == "after_gate" else y * gate
    return times(layer, "output") * y @ p["output.kernel"]


def short_convolution(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """y = (c * convolution(b * v)) Wo for b, c and v linear in x."""
    assert is_causal
    gates = {
        name: x @ p[f"{name}.kernel"] + p.get(f"{name}.bias", 0)
        for name in ("input_gate", "output_gate", "value")
    }
    mixed = convolve(p, "convolution", gates["input_gate"] * gates["value"])
    return (gates["output_gate"] * mixed) @ p["output.kernel"] + p.get("output.bias", 0)


def goom_ssm(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """y = glu(exp(2) s / max|s| C + x D) W, with the maxima of other states if given."""
    assert is_causal
    states = dense_states(p, x)
    largest = np.abs(p.get("other_states", states)).max(2, keepdims=True)
    read = (math.exp(2) * states / largest).reshape(len(x), -1)
    a, b = np.split(read @ p["readout.kernel"] + x @ p["skip.kernel"], 2, axis=1)
    return a * sigmoid(b) @ p["output.kernel"]


def dense_states(p: Any, x: Array) -> Array:
    """s <- s A + x B for the vectors of all heads, `[T, N, K]`."""
    states = [p["initial"]]
    for token in x @ p["input.kernel"]:
        states.append(states[-1] @ p["transition"] + token.reshape(states[0].shape))
    return np.array(states[1:])


def delta(layer: Any, p: Any, x: Array, decay: Array) -> list[Array]:
    """The delta rule for q and k of norm 1 and beta = sigmoid(x Wb), or twice that."""
    beta = sigmoid(x @ p["beta.kernel"]) * (2 if layer.config.negative_eigenvalues else 1)
    y = []
    for head, (q, k, v) in enumerate(zip(*heads_of(layer, p, x), strict=True)):
        b = beta[:, head]
        args = unit(q), unit(k), b[:, None] * v, decay[head], b, layer.key_depth**-0.5
        y.append(recurrence(*args))
    return y


def deltanet(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    assert is_causal
    ones = np.ones((layer.num_heads, len(x), 1))
    return output(layer, p, x, delta(layer, p, x, ones), None)


def gated_deltanet(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """alpha = exp(-exp(a) softplus(x Wa + b))"""
    assert is_causal
    rates = -np.exp(p["to_log_decay.log_rate"]) * softplus(
        x @ p["decay.kernel"] + p["to_log_decay.bias"]
    )
    return output(layer, p, x, delta(layer, p, x, split(layer, np.exp(rates))), silu)


def kda(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """As gated DeltaNet, with alpha by key feature and a low-rank gate."""
    assert is_causal
    logits = x @ p["decay.down.kernel"] @ p["decay.up.kernel"]
    logits = logits + p["to_log_decay.bias"].reshape(-1)
    log_rate, logits = p["to_log_decay.log_rate"][..., None], split(layer, logits)
    rates = -np.exp(log_rate) * softplus(logits)
    if layer.config.decay_lower_bound is not None:
        rates = layer.config.decay_lower_bound * sigmoid(np.exp(log_rate) * logits)
    y = delta(layer, p, x, np.exp(rates))
    gate = x @ p["gate.down.kernel"] @ p["gate.up.kernel"] + p["gate.up.bias"]
    normed = np.concatenate([rms(o, p["norm.scale"]) for o in y], 1)
    return (normed * sigmoid(gate)) @ p["output.kernel"]


def gated_deltanet2(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """S_t = (I - k_t (b_t * k_t)^T) Diag(exp g_t) S_(t-1) + k_t (w_t * v_t)^T."""
    assert is_causal
    low_rank = x @ p["decay.down.kernel"] @ p["decay.up.kernel"]
    rate = np.exp(p["to_log_decay.log_rate"])
    erase, write = (sigmoid(x @ p[f"{name}.kernel"]) for name in ("beta", "write"))
    erase = erase * (2 if layer.config.negative_eigenvalues else 1)
    y = []
    for head, (q, k, v) in enumerate(zip(*heads_of(layer, p, x), strict=True)):
        logits = split(layer, low_rank)[head] + p["to_log_decay.bias"][head]
        decay = np.exp(-rate[head] * softplus(logits))
        b, w = split(layer, erase)[head], split(layer, write)[head]
        state, outputs = np.zeros((layer.key_depth, layer.value_depth)), []
        for t in range(len(x)):
            key = unit(k[t])
            state = decay[t][:, None] * state
            state = state - np.outer(key, (b[t] * key) @ state) + np.outer(key, w[t] * v[t])
            outputs.append(unit(q[t]) @ state / math.sqrt(layer.key_depth))
        y.append(np.stack(outputs))
    gate = x @ p["gate.down.kernel"] @ p["gate.up.kernel"] + p["gate.up.bias"]
    normed = np.concatenate([rms(o, p["norm.scale"]) for o in y], 1)
    return (normed * sigmoid(gate)) @ p["output.kernel"]


def gated_deltaproduct(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """For i = 1 ... M: S <- S + beta_i k_i (v_i - S^T k_i)^T, after a decay."""
    assert is_causal
    steps, heads = layer.config.num_steps, layer.num_heads
    query, key, value = projected(layer, p, x)
    keys, values = (
        array.reshape(len(x), heads, steps, -1).transpose(1, 0, 2, 3) for array in (key, value)
    )
    beta = sigmoid(x @ p["beta.kernel"]).reshape(len(x), heads, steps).swapaxes(1, 2)
    beta = beta * (2 if layer.config.negative_eigenvalues else 1)
    logits = x @ p["decay.kernel"] + p["to_log_decay.bias"]
    decay = np.exp(-np.exp(p["to_log_decay.log_rate"]) * softplus(logits))
    y = []
    for head, q in enumerate(split(layer, query)):
        state, outputs = np.zeros((layer.key_depth, layer.value_depth)), []
        for t in range(len(x)):
            state = decay[t, head] * state
            for i in range(steps):
                k = unit(keys[head, t, i])
                error = values[head, t, i] - k @ state
                state = state + beta[t, i, head] * np.outer(k, error)
            outputs.append(unit(q[t]) @ state / math.sqrt(layer.key_depth))
        y.append(np.stack(outputs))
    return output(layer, p, x, y, silu)


def rwkv7(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """S_t = S_(t-1) (diag(w) - e^T (a e)) + v^T k, in rows as published (equation 16)."""
    assert is_causal
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])

    def mixed(name: str) -> Array:
        return x + p[f"mixes.{name}"] * (before - x)

    def low_rank(name: str, activation: Callable[[Array], Array]) -> Array:
        inner = activation(mixed(name) @ p[f"{name}.down.kernel"])
        return inner @ p[f"{name}.up.kernel"] + p.get(f"{name}.up.bias", 0)

    decay = np.exp(-math.exp(-0.5) * sigmoid(low_rank("decay", np.tanh)))
    share = sigmoid(low_rank("rate", lambda x: x))
    gate = low_rank("gate", sigmoid)
    query, plain, value = (mixed(x) @ p[f"{x}.kernel"] for x in ("query", "key", "value"))
    key = plain * (1 + (share - 1) * p["key_rate"])
    bonus = np.broadcast_to(p["bonus"], plain.shape)
    parts = query, key, value, decay, share, plain * p["key_scale"], bonus
    per_head = [split(layer, part) for part in parts]
    y = []
    for r, k, v, w, a, erased, u in zip(*per_head, strict=True):
        state, outputs = np.zeros((layer.value_depth, layer.key_depth)), []
        for t in range(len(x)):
            e = unit(erased[t])
            state = state @ (np.diag(w[t]) - np.outer(e, a[t] * e)) + np.outer(v[t], k[t])
            outputs.append(state @ r[t])
        o = np.stack(outputs)
        centered = o - o.mean(1, keepdims=True)
        epsilon = 1e-5 * layer.value_depth
        normed = centered / np.sqrt((centered**2).mean(1, keepdims=True) + epsilon)
        y.append((normed, (r * k * u).sum(1, keepdims=True) * v))
    normed, itself = (np.concatenate(x, 1) for x in zip(*y, strict=True))
    return ((normed * p["norm_scale"] + p["norm_bias"] + itself) * gate) @ p["output.kernel"]


def mlstm(layer: Any, p: Any, x: Array, is_causal: bool) -> Array:
    """C_t = f C_(t-1) + i k v^T, n_t = f n_(t-1) + i k, o = C^T q / max(|n . q|, 1)."""
    assert is_causal
    logits = {
        name: 15 * np.tanh((x @ p[f"{name}.kernel"] + p[f"{name}.bias"]) / 15)
        for name in ("input_gate", "forget_gate")
    }
    inputs, forget = np.exp(logits["input_gate"]), sigmoid(logits["forget_gate"])
    y = []
    for head, (query, key, value) in enumerate(zip(*heads_of(layer, p, x), strict=True)):
        memory, normalizer = np.zeros((layer.key_depth, layer.value_depth)), 0
        y.append([])
        for t in range(len(x)):
            k = inputs[t, head] * key[t] / math.sqrt(layer.key_depth)
            memory = forget[t, head] * memory + np.outer(k, value[t])
            normalizer = forget[t, head] * normalizer + k
            y[-1].append(query[t] @ memory / max(abs(normalizer @ query[t]), 1))
    normed = []
    for o in map(np.stack, y):
        centered = o - o.mean(1, keepdims=True)
        normed.append(centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-6))
    scaled = np.concatenate(normed, 1) * p["norm_scale"]
    return (scaled * sigmoid(x @ p["gate.kernel"])) @ p["output.kernel"]


MATRIX_ORACLES: dict[str, Callable[[Any, Any, Array, bool], Array]] = {
    "retnet": retnet,
    "gla": gla,
    "hgrn2": hgrn2,
    "mamba2": mamba2,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
    "mlstm": mlstm,
    "short_convolution": short_convolution,
    "goom_ssm": goom_ssm,
    "gated_deltanet2": gated_deltanet2,
    "gated_deltaproduct": gated_deltaproduct,
    "rwkv7": rwkv7,
}
