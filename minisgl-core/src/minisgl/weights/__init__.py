"""Finding a model and streaming its weights."""
