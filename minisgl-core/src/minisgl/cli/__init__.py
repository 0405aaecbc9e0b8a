"""The ``minisgl`` command; subcommands come from hook plugins, the core's own included."""
