"""Resharding: weights move between trainer, engine and checkpoint, shard to shard, by a plan that is pure data."""
