"""Oracles of all mechanisms: their definitions, one sequence and head at a time.

In NumPy's float64, without code of the package. An oracle is called with a layer, from which it
reads sizes and configuration, its parameters by path such as 'project.kernel', tokens `[T, D]`, and
whether attention is causal.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tests.attention.matrix_oracles import MATRIX_ORACLES

Array = np.ndarray
Layer = Any
Parameters = Mapping[str, Array]
Oracle = Callable[[Layer, Parameters, Array, bool], Array]


def within(parameters: Parameters, name: str) -> Parameters:
    """Those of a layer's part."""
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in parameters.items() if k.startswith(start)}


def positions(length: int, is_causal: bool) -> tuple[Array, Array]:
    """Return the distance of each key behind a query, `[T, T]`, and the causal mask."""
    behind = np.arange(length)[:, None] - np.arange(length)[None]
    return behind, (behind >= 0) | (not is_causal)


def heads(
    layer: Layer,
    p: Parameters,
    x: Array,
    source: Array | None = None,
    name: str = "project",
    is_rotated: bool = True,
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield for each query head its queries, and the keys and values of its key/value head.

    The columns of a key/value head: queries of its query heads, its keys, its values. Queries and
    keys are normalized and rotated if the layer is configured so.
    """
    of_queries = x @ p[f"{name}.kernel"] + p[f"{name}.bias"]
    of_source = of_queries if source is None else source @ p[f"{name}.kernel"] + p[f"{name}.bias"]
    shared, depth = layer.num_heads // layer.num_kv_heads, layer.key_depth
    width = shared * depth + depth + layer.value_depth
    if layer.config.query_key_norm == "joint":
        of_queries, of_source = of_queries.copy(), of_source.copy()
        starts = range(0, layer.num_kv_heads * width, width)
        columns = np.concatenate([start + np.arange(shared * depth) for start in starts])
        of_queries[:, columns] = rms_norm(within(p, "query_norm"), of_queries[:, columns])
        columns = np.concatenate([start + shared * depth + np.arange(depth) for start in starts])
        of_source[:, columns] = rms_norm(within(p, "key_norm"), of_source[:, columns])
    for head in range(layer.num_heads):
        group, member = divmod(head, shared)
        query = of_queries[:, group * width + member * depth :][:, :depth]
        key = of_source[:, group * width + shared * depth :][:, :depth]
        value = of_source[:, group * width + shared * depth + depth :][:, : layer.value_depth]
        if layer.config.query_key_norm is True:
            offset = float(layer.config.zero_centered_norm)
            query, key = (
                rms_norm({"scale": p[f"{name}.scale"] + offset}, x)
                for name, x in (("query_norm", query), ("key_norm", key))
            )
        if is_rotated and getattr(layer.config, "positions", "none") == "rotary":
            query, key = rotated(query), rotated(key)
        yield query, key, value


def out_proj(layer: Layer, p: Parameters, y: list[Array]) -> Array:
    """(a * sigmoid(b)) W3 with a | b = y W2 + b2, if gated; or else y W3 + b3."""
    joined = np.concatenate(y, 1)
    if not layer.config.gated:
        return layer.config.output_multiplier * (joined @ p["output.kernel"] + p["output.bias"])
    a, b = np.split(joined @ p["gate.kernel"] + p["gate.bias"], 2, axis=1)
    return a / (1 + np.exp(-b)) @ p["output.kernel"]


def average(weights: Array, visible: Array, value: Array, more: float = 0.0) -> Array:
    """sum_s weights_ts value_s / (more + sum_s weights_ts), over the keys visible to t."""
    weights = np.where(visible, weights, 0.0)
    return weights @ value / (more + weights.sum(1, keepdims=True))


def similarity(query: Array, key: Array) -> Array:
    """exp(q . k / sqrt(depth)), which a softmax divides by its sum: no score is large here."""
    return np.exp(query @ key.T / math.sqrt(query.shape[1]))


def nearness(query: Array, key: Array) -> Array:
    """exp(-|q - k|_1 / sqrt(depth)), for L1 attention."""
    distance = np.abs(query[:, None] - key[None]).sum(2)
    return np.exp(-distance / math.sqrt(query.shape[1]))


def layer_norm(p: Parameters, x: Array) -> Array:
    centered = x - x.mean(1, keepdims=True)
    variance = (centered**2).mean(1, keepdims=True)
    return centered / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def rms_norm(p: Parameters, x: Array) -> Array:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * p["scale"]


# Local and sparse attention.


def anywhere(config: Any, behind: Array) -> Array:
    del config
    return np.full(behind.shape, True)


def within_window(config: Any, behind: Array) -> Array:
    is_sink = np.arange(behind.shape[1])[None] < getattr(config, "num_sinks", 0)
    return (np.abs(behind) < config.window_size) | is_sink


def within_dilated_window(config: Any, behind: Array) -> Array:
    steps, rest = np.divmod(np.abs(behind), config.dilation)
    return (rest == 0) & (steps < config.window_size)


def within_blocks(config: Any, behind: Array) -> Array:
    """Child et al. (2019), section 4.2."""
    size = config.block_size
    query, key = np.indices(behind.shape)
    if config.pattern == "local":
        return behind < size
    if config.pattern == "strided":
        return behind % size == 0
    return (key // size == query // size) | (key % size >= size - config.num_summaries)


def within_growing_dilation(config: Any, behind: Array) -> Array:
    """The nearest, and those 2, 4, 8, ... windows away."""
    farther = [config.window_size * 2**n for n in range(1, 30)] if config.far else []
    return within_window(config, behind) | np.isin(np.abs(behind), farther)


def masked(
    is_visible: Callable[[Any, Array], Array], weigh: Callable[[Array, Array], Array] = similarity
) -> Oracle:
    def oracle(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
        behind, visible = positions(len(x), is_causal)
        visible = visible & is_visible(layer.config, behind)
        more = 0.0 if weigh is similarity else layer.config.denominator_bias
        y = [average(weigh(q, k), visible, v, more) for q, k, v in heads(layer, p, x)]
        if getattr(layer.config, "output_gate", None) is not None:
            gate = 1 / (1 + np.exp(-(x @ p["output_gate.kernel"] + p["output_gate.bias"])))
            gates = np.split(gate, layer.num_heads, axis=1)
            y = [one * of_head for one, of_head in zip(y, gates, strict=True)]
        return out_proj(layer, p, y)

    return oracle


def longformer(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """A window and the first tokens; these attend to all, with separate queries, keys and
    values."""
    behind, visible = positions(len(x), is_causal)
    is_global = np.arange(len(x)) < layer.config.num_global_tokens
    near = visible & (within_window(layer.config, behind) | is_global[None])
    y = []
    both = zip(heads(layer, p, x), heads(layer, p, x, name="project_global"), strict=True)
    for (query, key, value), (own_query, own_key, own_value) in both:
        of_all = average(similarity(query, key), near, value)
        of_global = average(similarity(own_query, own_key), visible, own_value)
        y.append(np.where(is_global[:, None], of_global, of_all))
    return out_proj(layer, p, y)


# Attention to compressed keys and values.


def latent(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """MLA: keys [c W^K | rotated k_pe] and values c W^V, where c | k_pe = x Wc and c is normalized.

    Queries are [q | rotated q_pe], and scores are divided by the root of the depth of both parts.
    """
    _, visible = positions(len(x), is_causal)
    low = x
    if layer.config.query_rank is not None:
        low = rms_norm(within(p, "query_norm"), x @ p["query_down.kernel"])
    queries = low @ p["query.kernel"]
    down = x @ p["down.kernel"]
    compressed = rms_norm(within(p, "norm"), down[:, : layer.rank])
    shared_key = rotated(down[:, layer.rank :])
    y = []
    for head, query in enumerate(np.split(queries, layer.num_heads, axis=1)):
        plain, to_rotate = query[:, : layer.key_depth], query[:, layer.key_depth :]
        query = np.concatenate([plain, rotated(to_rotate)], 1)
        key = np.concatenate([compressed @ p["key_up"][head], shared_key], 1)
        y.append(average(similarity(query, key), visible, compressed @ p["value_up"][head]))
    return np.concatenate(y, 1) @ p["output.kernel"]


def rotated(x: Array) -> Array:
    """Adjacent features as complex numbers, rotated by position * 10000^(-2i / depth)."""
    length, depth = x.shape
    speeds = 10000.0 ** (-2 * np.arange(depth // 2) / depth)
    angles = np.arange(length)[:, None] * speeds[None]
    turned = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], 2).reshape(length, depth)


def transient_global(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """LongT5: one softmax over the nearest tokens and normalized sums of blocks.

    Tokens after the last complete block belong to it; or, if causal, to none. A causal token
    attends to the blocks before its own.
    """
    config, length = layer.config, len(x)
    behind, visible = positions(length, is_causal)
    count = length // config.block_size
    block = np.arange(length) // config.block_size
    block = block if is_causal else np.minimum(block, count - 1)
    sums = np.stack([x[block == number].sum(0) for number in range(count)])
    block_behind = block[:, None] - np.arange(count)[None]
    visible = np.concatenate(
        [visible & (np.abs(behind) <= config.radius), (block_behind > 0) | (not is_causal)], 1
    )
    near, far = (bucket(config, -distance, is_causal) for distance in (behind, block_behind))
    summaries = rms_norm(within(p, "global_norm"), sums)
    everything = np.concatenate([x, summaries])
    y = []
    for head, (query, key, value) in enumerate(heads(layer, p, x, everything)):
        bias = np.concatenate([p["local_bias"][near, head], p["global_bias"][far, head]], 1)
        y.append(average(similarity(query, key) * np.exp(bias), visible, value))
    return out_proj(layer, p, y)


def bucket(config: Any, position: Array, is_causal: bool) -> Array:
    """T5's buckets: half of them for each side, of these half for a distance each, and the others
    for distances that grow by a factor."""
    one_side = config.num_buckets if is_causal else config.num_buckets // 2
    exact = one_side // 2
    distance = np.abs(position)
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(config.max_distance / exact)
    wide = exact + np.floor(growth * (one_side - exact)).astype(int)
    found = np.where(distance < exact, distance, np.minimum(wide, one_side - 1))
    return found if is_causal else found + one_side * (position > 0)


def memory_compressed(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """Groups of tokens are compressed to one key and one value; the last group is padded with
    zeros.

    All attend to a null key; causal tokens also to the groups that end at or before them.
    """
    factor, length = layer.config.factor, len(x)
    ends = np.arange(factor - 1, length + factor - 1, factor)
    complete = ends[None] <= np.arange(length)[:, None]
    visible = np.concatenate([np.full((length, 1), True), complete | (not is_causal)], 1)

    def compressed(part: Parameters, group: int, x: Array) -> Array:
        groups = [part["null"][group]]
        for end in ends:
            tokens = x[end - factor + 1 : end + 1]
            products = (token @ part["kernel"][group, i] for i, token in enumerate(tokens))
            groups.append(sum(products, part["bias"][group]))
        return np.stack(groups)

    y = []
    for head, (query, key, value) in enumerate(heads(layer, p, x)):
        group = head // (layer.num_heads // layer.num_kv_heads)
        key = compressed(within(p, "of_keys"), group, key)
        value = compressed(within(p, "of_values"), group, value)
        y.append(average(similarity(query, key), visible, value))
    return out_proj(layer, p, y)


def linformer(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """softmax(Q (E^T K)^T / sqrt(depth)) F^T V, with the first rows of E and F."""
    assert not is_causal
    e, f = (p[name][: len(x)] for name in ("of_keys", "of_values"))
    visible = np.full((len(x), e.shape[1]), True)
    y = [average(similarity(q, e.T @ k), visible, f.T @ v) for q, k, v in heads(layer, p, x)]
    return out_proj(layer, p, y)


# Attention whose weights are products of features.


def linear(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """sum_s phi(q_t) . phi(k_s) v_s / (sum_s phi(q_t) . phi(k_s) + 1e-6)."""
    maps = {
        "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
        "identity": lambda x: x,
    }
    phi = maps[layer.config.feature_map]
    _, visible = positions(len(x), is_causal)
    y = [average(phi(q) @ phi(k).T, visible, v, 1e-6) for q, k, v in heads(layer, p, x)]
    return out_proj(layer, p, y)


def performer(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """Weights phi(q) . phi(k), phi(x) = exp(W x' - |x'|^2 / 2) and x' = x / depth^1/4."""
    _, visible = positions(len(x), is_causal)

    def phi(x: Array) -> Array:
        x = x / x.shape[1] ** 0.25
        return np.exp(x @ p["features"].T - (x**2).sum(1, keepdims=True) / 2)

    y = [average(phi(q) @ phi(k).T, visible, v) for q, k, v in heads(layer, p, x)]
    return out_proj(layer, p, y)


def hedgehog(x: Array) -> Array:
    """log [softmax(x), softmax(-x)]"""
    exps = (np.exp(y) for y in (x, -x))
    return np.log(np.concatenate([y / y.sum(1, keepdims=True) for y in exps], 1))


def product(x: Array) -> Array:
    """All sums of an element of the first half of a row and one of the second half."""
    middle = x.shape[1] // 2
    return np.array([[a + b for a in row[:middle] for b in row[middle:]] for row in x])


def log(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """log Y = log(weights V) - log(sum of weights), where weights_ts = sum_a exp(q_ta + k_sa); or Y
    itself for linear values.

    With decay, the weight of s at t is multiplied by exp(log_decay_ra) for every token r after s,
    up to t; or, if not causal, up to the last token.
    """
    config, length = layer.config, len(x)
    behind, visible = positions(length, is_causal)
    if config.window_size is not None:
        visible = visible & (behind < config.window_size)
    log_decay = np.zeros((layer.num_kv_heads, length, layer.num_features))
    if config.decay in ("head", "feature"):
        rates = x @ p["decay_proj.kernel"] + p["decay_proj.bias"]
        log_decay = -np.log1p(np.exp(-np.stack(np.split(rates, layer.num_kv_heads, axis=1))))
    y = []
    for head, (query, key, value) in enumerate(heads(layer, p, x)):
        if config.features == "hedgehog":
            group = head // (layer.num_heads // layer.num_kv_heads)
            query = hedgehog(query @ p["query_features"][head])
            key = hedgehog(key @ p["key_features"][group])
        if config.features == "product":
            query, key = product(query), product(key)
        if config.decay == "coupled":
            key = key - np.log(np.exp(key).sum(1, keepdims=True))
            log_decay[head // (layer.num_heads // layer.num_kv_heads)] = np.log1p(-np.exp(key))
        decay = log_decay[head // (layer.num_heads // layer.num_kv_heads)]
        weights = np.zeros((length, length))
        for t, s in np.argwhere(visible):
            decayed = decay[s + 1 : t + 1 if is_causal else length].sum(0)
            weights[t, s] = np.exp(query[t] + key[s] + decayed).sum()
        is_log = config.values == "log"
        averaged = average(weights, visible, np.exp(value) if is_log else value)
        y.append(np.log(averaged) if is_log else averaged)
    return out_proj(layer, p, y)


def log_window(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """One softmax over q_t . k_s / sqrt(depth) in a window, and LSE(phi(q_t) + psi(k_s)) + g_t
    before it, where g_t = q_t . u + b with the query not rotated; with decay, times exp(d_r) for
    every token r after s that is not in the window."""
    assert is_causal
    behind, visible = positions(len(x), is_causal)
    y, unrotated = [], heads(layer, p, x, is_rotated=False)
    total = np.zeros((len(x), layer.num_kv_heads))
    if layer.config.decay is not None:
        rates = x @ p["decay_proj.kernel"] + p["decay_proj.bias"]
        total = np.cumsum(-np.log1p(np.exp(-rates)), 0)
    edge = np.maximum(np.arange(len(x)) - layer.config.window_size, 0)  # the last one outside
    for head, (query, key, value) in enumerate(heads(layer, p, x)):
        log_weight = next(unrotated)[0] @ p["log_weight"][head] + p["log_weight_bias"][head]
        weights = similarity(query, key)
        group = head // (layer.num_heads // layer.num_kv_heads)
        if layer.config.features == "hedgehog":
            query = hedgehog(query @ p["query_features"][head])
            key = hedgehog(key @ p["key_features"][group])
        log_weight = log_weight[:, None] + total[edge, group][:, None] - total[:, group]
        earlier = np.exp(log_weight) * (np.exp(query) @ np.exp(key).T)
        weights = np.where(behind < layer.config.window_size, weights, earlier)
        y.append(average(weights, visible, value))
    return out_proj(layer, p, y)


def taylor(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """Weights 1 + u + u^2 / 2 + ..., u = q . k / sqrt(depth)."""
    _, visible = positions(len(x), is_causal)
    y = []
    for query, key, value in heads(layer, p, x):
        u = query @ key.T / math.sqrt(layer.key_depth)
        terms = (u**n / math.factorial(n) for n in range(layer.config.num_terms))
        y.append(average(sum(terms, np.zeros_like(u)), visible, value))
    return out_proj(layer, p, y)


def decayed_softmax(layer: Layer, p: Parameters, x: Array, log_decay: Array) -> Array:
    """softmax(q_t . k_s / sqrt(depth) + sum of the log decays `[N, T]` after s up to t)."""
    _, visible = positions(len(x), True)
    y = []
    for (query, key, value), decay in zip(heads(layer, p, x), log_decay, strict=True):
        total = np.cumsum(decay)
        weights = similarity(query, key) * np.exp(total[:, None] - total[None])
        y.append(average(weights, visible, value))
    return out_proj(layer, p, y)


def forgetting(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    assert is_causal
    logits = x @ p["forget_gate.kernel"] + p["forget_gate.bias"]
    return decayed_softmax(layer, p, x, -np.log1p(np.exp(-logits)).T)


def softmax(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """With ALiBi, head n decays by 2^(-8 n / N), n = 1, ..., N."""
    if layer.config.positions != "alibi":
        return masked(anywhere)(layer, p, x, is_causal)
    assert is_causal
    slopes = 2.0 ** (-8 * np.arange(1, layer.num_heads + 1) / layer.num_heads)
    return decayed_softmax(layer, p, x, np.repeat(-slopes[:, None], len(x), 1))


# Layers of several parts.


def additive(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """Fastformer: m = pool(x Wq; wq) Wp * (x Wk), y = m + pool(norm(x + m); wk) * (x Wv).

    pool averages under weights softmax(w . x / sqrt(depth)) of each head.
    """
    behind, visible = positions(len(x), is_causal)
    if layer.config.window_size is not None:
        visible = visible & (behind < layer.config.window_size)

    def pool(x: Array, weights: Array) -> Array:
        parts = []
        for part in np.split(np.arange(x.shape[1]), layer.num_heads):
            of_token = np.exp(x[:, part] @ weights[part] / math.sqrt(len(part)))
            parts.append(average(of_token[None], visible, x[:, part]))
        return np.concatenate(parts, 1)

    pooled = pool(x @ p["query.kernel"], p["query_weights"])
    mixed = pooled @ p["project.kernel"] * (x @ p["key.kernel"])
    between = layer_norm(within(p, "norm"), x + mixed)
    return mixed + pool(between, p["key_weights"]) * (x @ p["value.kernel"])


def conditional(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """CoLT5: y_i = light(x)_i + lambda^q_i heavy(x_i, {lambda^kv_j x_j}) for i and j routed."""
    assert not is_causal
    config, heavy = layer.config, layer.heavy

    def route(scores: Array, max_tokens: int) -> tuple[Array, Array]:
        count = min(max_tokens, len(x))
        weights = soft_top_k(scores, min(9 / 8 * count, len(x)))
        chosen = np.argsort(-weights, kind="stable")[:count]
        return chosen, weights[chosen, None]

    queries, of_queries = route(x @ p["query_router"], config.num_queries)
    sources, of_sources = route(x @ p["source_router"], config.num_sources)
    y = ORACLES["sliding_window"](layer.light, within(p, "light"), x, False)
    visible = np.full((len(queries), len(sources)), True)
    part = within(p, "heavy")
    routed = heads(heavy, part, x[queries], of_sources * x[sources])
    read = [average(similarity(q, k), visible, v) for q, k, v in routed]
    y[queries] += of_queries * out_proj(heavy, part, read)
    return y


def soft_top_k(scores: Array, k: float) -> Array:
    """By coordinate descent on the multipliers a and b, in 50 steps at a temperature of 1."""
    a, b = 0.0, -scores
    for _ in range(50):
        a = math.log(k) - np.log(np.exp(scores + b).sum())
        b = -np.maximum(scores + a, 0)
    return np.exp(scores + a + b)


def recurrent_memory(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    """RMT: [_, x + y, m'] = s + attention(norm(s)), s = [m | x | m], segment after segment."""
    assert is_causal
    memory, y = p["memory"], []
    for start in range(0, len(x), layer.config.segment_length):
        segment = x[start : start + layer.config.segment_length]
        s = np.concatenate([memory, segment, memory])
        normal = layer_norm(within(p, "norm"), s)
        s = s + ORACLES["softmax"](layer.attention, within(p, "attention"), normal, True)
        _, tokens, memory = np.split(s, [len(memory), len(memory) + len(segment)])
        y.append(tokens - segment)
    return np.concatenate(y)


def parallel(layer: Layer, p: Parameters, x: Array, is_causal: bool) -> Array:
    parts = layer.config.parts
    return sum(ORACLES[y](getattr(layer, y), within(p, y), x, is_causal) for y in parts)


ORACLES: dict[str, Oracle] = MATRIX_ORACLES | {
    "gqa+mamba2": parallel,
    "log": log,
    "log_window": log_window,
    "softmax": softmax,
    "taylor": taylor,
    "fox": forgetting,
    "gqa": masked(anywhere),
    "mla": latent,
    "sliding_window": masked(within_window),
    "dilated": masked(within_dilated_window),
    "longformer": longformer,
    "tglobal": transient_global,
    "block_sparse": masked(within_blocks),
    "memory_compressed": memory_compressed,
    "linformer": linformer,
    "linear": linear,
    "performer": performer,
    "colt5": conditional,
    "rmt": recurrent_memory,
    "l1": masked(anywhere, nearness),
    "l1_sparse": masked(within_growing_dilation, nearness),
    "additive": additive,
}
