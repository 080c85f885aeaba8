"""`megarl diagnose`: compares trainer, engine and plain transformers layer by layer on one saved rollout."""
