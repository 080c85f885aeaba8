"""A run's configuration: its schema, how it is loaded from YAML, and the rules it must keep. Works without torch."""
