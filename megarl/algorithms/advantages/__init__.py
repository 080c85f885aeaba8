"""Advantage estimators, one file for each, with its SPEC and its function. Only trained tokens are actions."""
