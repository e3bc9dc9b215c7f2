"""Weights that several processes share: their shards, and the exchange of whole matrices."""
