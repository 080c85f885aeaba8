"""Objectives of the actor, a file for each: its SPEC and its function, a loss per token or per pair of responses.

In all policy objectives log_prob, old and advantage are float32 [N], gradients flow into log_prob only, and the ratio
is ρ = π/π_old = exp(log_prob − old), bounded as ratio.py says.

An objective of whole samples has a sample's loss stand at each of its tokens. With a weight of 1/(S·n) a token
(sequence_mean_of_token_means) their sum over a sample is the paper's loss, in value and gradient; with other weights a
sample counts by the sum of its tokens' weights. Where advantages differ within a sample, or a correction's weights of
tokens, each token has the loss with its own, and the gradient that it would have if all of them were so (as GSPO-token
has it).
"""
