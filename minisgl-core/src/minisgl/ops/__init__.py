"""The kernel-set contract, its torch reference, and the table that a chain of sets resolves to."""
