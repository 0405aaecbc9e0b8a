"""Attention over the paged KV pool: the contract, the torch reference, the prefill/decode pair."""
