"""Objectives of the actor, one file for each, with its SPEC and its function: a loss per token or pair of responses.

In all policy objectives log_prob, old and advantage are float32 [N], gradients flow into log_prob only, and the ratio
is ρ = π/π_old = exp(log_prob − old), bounded as in ratio.py.

An objective of whole samples puts a sample's loss at each of its tokens. With a weight of 1/(S·n) a token
(sequence_mean_of_token_means) their sum over a sample is the paper's loss, in value and gradient; with other weights a
sample counts by the sum of its tokens' weights. Where advantages or a correction's weights differ within a sample, each
token has the loss with its own advantage and weight, and the gradient that it would have if all tokens had them (as in
GSPO-token).
"""
