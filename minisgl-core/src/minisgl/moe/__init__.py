"""Mixture of experts: the contract and its torch reference."""
