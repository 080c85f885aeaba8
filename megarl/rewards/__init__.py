"""Reward functions, found by name or in a user's file, and the scorer that calls them. No torch."""
