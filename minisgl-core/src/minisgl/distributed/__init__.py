"""Collectives: the contract and torch.distributed."""
