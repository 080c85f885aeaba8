"""Advantage estimators. Each file holds one estimator and its SPEC. Actions are the trained tokens only."""
