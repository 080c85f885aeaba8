"""Pure functions of tensors and named scalars: advantages, KL estimators, policy objectives and loss aggregation."""
