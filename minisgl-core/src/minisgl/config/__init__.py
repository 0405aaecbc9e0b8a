"""The settings tree: the one source of flags, environment variables, file keys and help."""
