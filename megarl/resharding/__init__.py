"""Move weights between trainers, engines and checkpoints, shard to shard, according to a plan that is pure data.

A holder is a process or folder that stores weights: a trainer rank, an engine worker, a checkpoint or a Hugging Face
folder. Its shard lists its parameters and the pieces that they consist of. A piece maps a rectangle in one parameter to
the rectangle in a Hugging Face tensor that has the same elements.
"""
