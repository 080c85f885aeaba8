"""Which model is this: its folder, its config.json, the architecture that it describes, and its tokenizer."""
