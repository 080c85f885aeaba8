"""Models on disk: their folders, config.json files, architectures and tokenizers."""
