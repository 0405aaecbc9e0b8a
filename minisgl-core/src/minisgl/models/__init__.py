"""Model architectures and the configuration that they share."""
