"""Advantage estimators. Each file holds one estimator and its SPEC. Only trained tokens count as actions."""
