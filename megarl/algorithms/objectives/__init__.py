"""Training objectives of the actor. Each file holds an objective and its SPEC: a loss per token or pair.

In all policy objectives, log_prob, old and advantage are float32 [N], gradients flow into log_prob only, and the ratio
is ρ = π/π_old = exp(log_prob − old), bounded as in policy_loss.py.

A sample-level objective assigns the sample's loss to each of its tokens. With token weights 1/(S·n)
(sequence_mean_of_token_means) the sum over a sample equals the paper's loss, in value and gradient; with other
aggregations a sample is weighted by the sum of its token weights. If advantages or correction weights vary within a
sample, each token's loss uses its own advantage and weight, with the gradient that it would have if all tokens shared
them (as in GSPO-token).
"""
