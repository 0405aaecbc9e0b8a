"""The processes around an API server: schedulers, tokenizers, detokenizer."""
