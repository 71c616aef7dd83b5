"""Softmax attention with fewer key/value heads than query heads, as a layer."""

from heinsen_jax.attention.softmax import SoftmaxAttention


class GroupedQueryAttention(SoftmaxAttention):
    """Grouped-query attention: query head n uses key/value head n // (num_heads // num_kv_heads).

    By default four query heads share one, or all do if four does not divide their number.

    References:
      Ainslie et al., 2023, GQA, arXiv:2305.13245.
    """

    def default_kv_heads(self) -> int:
        shared = self.num_heads // 4 if self.num_heads % 4 == 0 else 1
        return self.config.num_kv_heads or shared
