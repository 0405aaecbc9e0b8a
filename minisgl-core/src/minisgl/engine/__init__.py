"""Computes: model, KV pool, graphs, sampler."""
