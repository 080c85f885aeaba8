"""Move weights between trainers, engines and checkpoints, shard to shard, according to a plan that is pure data."""
