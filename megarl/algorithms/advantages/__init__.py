"""Advantage estimators, a file for each: its SPEC and its function. Only trained tokens are actions."""
