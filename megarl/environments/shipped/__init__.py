"""Built-in environments, which a config selects by name."""
