"""Log-attention as a layer: the residual branch of Heinsen's (2024) language model."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import pydantic

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import WindowCache
from heinsen_jax.attention.features import FeaturesConfig
from heinsen_jax.attention.heads import HeadedAttention, HeadProjection
from heinsen_jax.attention.parameters import decay_projection, identity, in_float32, parameter
from heinsen_jax.ops.log_attention import (
    Chunked,
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.sharding import splits_tokens
from heinsen_jax.typing import Array, Features, Float, Keys, Query, Values, config_dataclass, wide

INITIAL_SCALE = 2.0
"""Initial scale of normalized queries and keys with product features: at 1, the features of
different keys are similar, and models with several heads learn to recall later."""


@config_dataclass
class LogConfig(FeaturesConfig):
    """Configuration of log-attention."""

    gated: bool = True
    """Whether a gated linear unit precedes the output projection, as in Heinsen's block."""
    values: Literal["log", "linear"] = "log"
    """Whether the projected values, and the outputs of attention, are logarithms, as in Heinsen's
    model, or values of any sign."""
    window_size: pydantic.PositiveInt | None = None
    """Number of tokens that a query attends to, itself included; all when None."""
    decay: Literal["head", "feature", "coupled"] | None = None
    """Decay at every token; no decay when None. head, feature: at a trained rate that depends on
    the token, one per key/value head or one per key feature. coupled: the key is normalized by a
    softmax over the features, and the state of each feature is multiplied by 1 - exp(key)."""
    max_timescale: Annotated[float, pydantic.Field(ge=1)] = 4096.0
    """Initial time constant, in tokens, of the slowest-decaying head or feature. The fastest decay
    initially multiplies the state by 1/2 at each token. Unused by coupled decay."""
    features: Literal["identity", "hedgehog", "product"] = "identity"
    """Log features of queries and keys. identity: the projections themselves. hedgehog:
    log softmax(x W) and log softmax(-x W), with a trained matrix W per head; twice as many
    features. product: all sums of an element of their first half and one of their second half;
    (key_depth / 2)^2 features. With query_key_norm, the scales of the norms are then initially
    2."""
    implementation: Literal["reference", "scan", "chunked", "gpu"] | Chunked | None = None
    """Implementation of `log_attention`; chosen automatically when None. "gpu" is experimental."""

    @property
    def capabilities(self) -> Capabilities:
        if self.window_size is not None:
            return Capabilities(causal=True, streaming=True, segments=True)
        return Capabilities.all()

    def feature_depth(self, key_depth: int) -> int:
        if self.features == "product":
            return (key_depth // 2) ** 2
        return key_depth * (2 if self.features == "hedgehog" else 1)


State = LogAttentionState | HeinsenAttentionState | WindowCache


class LogAttention(HeadedAttention[LogConfig, State]):
    """Projections, log-attention and a gated output; the attention itself has no parameters.

        q | k | log v = x W1 + b1                   for each key/value head, adjacent
        y = GLU(log_attention(q, k, log v) W2 + b2) W3        GLU(a, b) = a * sigmoid(b)

    Heads are concatenated. The branch uses log Y: values are never exponentiated. With
    `values="linear"`, v and heinsen_attention(q, k, v) replace log v and log Y. Decay,
    if configured, is log sigmoid(x Wd + bd). Initially the slowest decay reduces the state to
    about 1/e in `max_timescale` tokens, and the fastest to 1/2 at each token.

    With `decay="coupled"`, the decay of a feature follows from the key, as in LSTMs with coupled
    gates (Greff et al., 2017) and in HGRN2:

        K = log softmax(k),                           y_t = exp(Q_t) S_t / (exp(Q_t) Z_t)
        S_t = (1 - exp(K_t))^T S_(t-1) + exp(K_t)^T v_t
        Z_t = (1 - exp(K_t))^T Z_(t-1) + exp(K_t)^T

    Features then act as slots, each with an average of the values written to it.

    With `features="product"`, both parts (a, b) of a query or key give the features a_i + b_j,
    whose exponentials are products. A score is then the sum of the scores of the parts,

        LSE_ij(Qa_i + Qb_j + Ka_i + Kb_j) = LSE_i(Qa_i + Ka_i) + LSE_j(Qb_j + Kb_j)

    so that a key must match in both, as with the product keys of Lample et al. (2019).

    Raises:
      ValueError: features="product" with an odd key_depth, or decay="coupled" with one feature; and
        as in `HeadedAttention`.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843; Greff et al.,
      2017, LSTM: A Search Space Odyssey, arXiv:1503.04069; Lample et al., 2019, Large Memory Layers
      with Product Keys, arXiv:1907.05242.
    """

    Config = LogConfig

    def setup(self, **options: Any) -> None:
        super().setup(**options)
        if self.config.features == "hedgehog":
            shape = self.num_heads, self.key_depth, self.key_depth
            self.query_features = parameter(identity, *shape, kind="matrix", **options)
            self.key_features = parameter(
                identity, self.num_kv_heads, *shape[1:], kind="matrix", **options
            )
        if self.config.features == "product":
            if self.key_depth % 2:
                raise ValueError(
                    f"key_depth={self.key_depth} must be even with features='product', for two "
                    "parts"
                )
            if self.config.query_key_norm:
                for norm in (self.query_norm, self.key_norm):
                    assert norm.scale is not None
                    scale = INITIAL_SCALE - self.config.zero_centered_norm
                    norm.scale[...] = jnp.full_like(norm.scale[...], scale)
        if self.config.decay == "coupled":
            if self.num_features < 2:
                raise ValueError(
                    f"key_depth={self.key_depth} gives one feature: decay='coupled' needs two, so "
                    "set key_depth to at least 2, or 4 with features='product'"
                )
        elif self.config.decay is not None:
            num_decays = self.num_kv_heads * self._decays_per_head
            self.decay_proj = decay_projection(
                self.model_dim, num_decays, self.config.max_timescale, **options
            )

    @property
    def _decays_per_head(self) -> int:
        num_features = self.num_features
        return {None: 0, "head": 1, "feature": num_features, "coupled": num_features}[
            self.config.decay
        ]

    @property
    def num_features(self) -> int:
        """Number of features of a query or key."""
        return self.config.feature_depth(self.key_depth)

    def heads(
        self,
        x: Features,
        source: Float[Array, "*B S D"] | None = None,
        project: HeadProjection | None = None,
    ) -> tuple[Query, Keys, Values]:
        query, key, value = super().heads(x, source, project)
        if self.config.features == "hedgehog":
            query = hedgehog_features(query, self.query_features[...])
            key = hedgehog_features(key, self.key_features[...])
        elif self.config.features == "product":
            query, key = product_features(query), product_features(key)
        if self.config.decay == "coupled":
            key = jax.nn.log_softmax(in_float32(key), -1)
        return query, key, value

    def apply(self, x: Array, call: CallArguments) -> tuple[Array, Any]:
        query, *arrays = self.heads(x, call.source)
        if self.config.decay is not None:
            arrays.append(self._log_decay(x if call.source is None else call.source, arrays[0]))
        with jax.named_scope("log_attention"):
            if isinstance(call.state, WindowCache):
                mixed, state = self._over_window(query, arrays, call)
            elif self.config.window_size is not None or call.source is not None:
                mixed, state = call.recur(self._attend, query, *arrays, **call.keywords)
            else:
                self._check_order(call, x.shape[-2])
                empty = self.init_state(x.shape[:-2])
                assert not isinstance(empty, WindowCache)
                mixed, state = devices.recur(call, self._attend, query, *arrays, empty=empty)
        return self.out_proj(mixed), state

    def importance(self, x: Array) -> Array:
        """Attention weights of token s at token t, causally. For inspection; the size is quadratic.

            weights_ts = softmax_s(LSE_K(Q_t + K_s + decay from s to t))    eq. (1)

        Args:
          x: `[..., T, D]`.

        Returns:
          `[..., T, T, num_heads]`, at least float32; they sum to 1 over s, the second axis T.
        """
        dtype = wide(x)
        query, key, _ = (heads.astype(dtype) for heads in self.heads(x))
        shared = self.num_heads // self.num_kv_heads
        log_decay = None if self.config.decay is None else self._log_decay(x, key)
        key = jnp.repeat(key, shared, -2)
        scores = query[..., :, None, :, :] + key[..., None, :, :, :]
        behind = jnp.arange(x.shape[-2])[:, None] - jnp.arange(x.shape[-2])[None]
        if log_decay is not None:
            decay = jnp.repeat(jnp.cumsum(log_decay, -3), shared, -2)
            scores = scores + decay[..., :, None, :, :] - decay[..., None, :, :, :]
        visible = (behind >= 0) & (behind < (self.config.window_size or x.shape[-2]))
        scores = jnp.where(visible[..., None], jax.nn.logsumexp(scores, -1), -jnp.inf)
        return jax.nn.softmax(scores, -2)

    def _log_decay(self, x: Array, key: Array) -> Array:
        """`[..., S, num_kv_heads, K]`, or 1 in place of K."""
        if self.config.decay == "coupled":
            return log_complement(key)
        rates = self.decay_proj(x)
        return jax.nn.log_sigmoid(
            rates.reshape(*x.shape[:-1], self.num_kv_heads, self._decays_per_head)
        )

    def _check_order(self, call: CallArguments, length: int) -> None:
        if self.config.decay is not None and not call.is_causal and splits_tokens(length):
            raise NotImplementedError(
                "LogAttention: decay is unsupported with is_causal=False on a split sequence; "
                "use a mesh without a context axis"
            )

    def _attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        log_decay: Array | None = None,
        **options: Any,
    ) -> Any:
        """Call `log_attention` or, for linear values, `heinsen_attention`, as configured."""
        op = log_attention if self.config.values == "log" else heinsen_attention
        if log_decay is not None and self.config.decay == "head":
            log_decay = log_decay[..., 0]
        return op(
            query,
            key,
            value,
            log_decay=log_decay,
            local_window_size=self.config.window_size,
            implementation=self.config.implementation,
            **options,
        )

    def _over_window(
        self, query: Array, new: list[Array], call: CallArguments
    ) -> tuple[Array, WindowCache]:
        """Attention over the cached window and the new tokens."""
        if call.segment_ids is not None:
            raise NotImplementedError(
                "LogAttention: window is unsupported with segment_ids and a state; pass whole "
                "segments without a state"
            )
        assert isinstance(call.state, WindowCache)
        arrays, after = call.state.append(*new)
        size = call.state.size
        padding = [(0, 0)] * query.ndim
        padding[-3] = (size, 0)
        valid = call.state.bounds(query.shape[-3], query.shape[:-3])
        mixed = self._attend(jnp.pad(query, padding), *arrays, key_value_seq_lengths=valid)
        return mixed[..., size:, :, :], after

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> State:
        groups, dtype = self.num_kv_heads, self.sums_dtype
        if self.config.window_size is None:
            is_log = self.config.values == "log"
            kind = LogAttentionState if is_log else HeinsenAttentionState
            sizes = groups, self.num_features, self.value_depth
            has_decay = self.config.decay is not None
            return kind.empty(batch_shape, *sizes, dtype, has_decay=has_decay)
        depths = self.num_features, self.value_depth, self._decays_per_head
        shapes = [(groups, depth) for depth in depths if depth]
        return WindowCache.empty(batch_shape, shapes, dtype, self.config.window_size - 1)


def hedgehog_features(
    x: Float[Array, "*B T N K"], kernel: Float[Array, "N K K"]
) -> Float[Array, "*B T N _"]:
    """log softmax(x W) | log softmax(-x W) for the matrix W of each head: log-attention of these is
    linear attention with Hedgehog's feature map (Zhang et al., 2024), without its clamp."""
    projected = in_float32(jnp.einsum("...nk,nkl->...nl", x, kernel.astype(x.dtype)))
    return jnp.concatenate([jax.nn.log_softmax(y, -1) for y in (projected, -projected)], -1)


def product_features(x: Float[Array, "*B T N K"]) -> Float[Array, "*B T N _"]:
    """All a_i + b_j, for the two parts a and b of each head."""
    first, second = jnp.split(x, 2, -1)
    sums = first[..., :, None] + second[..., None, :]
    return sums.reshape(*x.shape[:-1], sums.shape[-1] * sums.shape[-2])


def log_complement(log_p: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """log(1 - p) for the logarithms of K > 1 probabilities, whose sum is 1; accurate also if one of
    them rounds to 1."""
    is_largest = jax.nn.one_hot(jnp.argmax(log_p, -1), log_p.shape[-1], dtype=bool)
    others = jnp.where(is_largest, -jnp.inf, log_p)
    complement = jax.nn.logsumexp(others, -1, keepdims=True)
    return jnp.where(is_largest, complement, jnp.log1p(-jnp.exp(others)))
