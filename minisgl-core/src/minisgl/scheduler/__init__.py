"""Decides: admission, prefill chunks, the decode set, page tables, results."""
