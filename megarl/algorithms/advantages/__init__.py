"""Advantage estimators on packed rows: N rows of response tokens, by sample. Only trained tokens are actions."""
