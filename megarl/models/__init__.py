"""Models on disk: folders, config.json, architectures and tokenizers."""
