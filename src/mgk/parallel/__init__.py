"""Attention over sequences that several processes hold in parts."""

from mgk.parallel.ring import ring_attention
from mgk.parallel.sharding import gather_sequence, shard_sequence

__all__ = ["gather_sequence", "ring_attention", "shard_sequence"]
