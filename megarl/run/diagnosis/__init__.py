"""`megarl diagnose`: one saved rollout through trainer, engine and plain transformers, layer by layer."""
