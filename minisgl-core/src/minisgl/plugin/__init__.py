"""How installed distributions offer backends (entry points) and take part (hooks)."""
