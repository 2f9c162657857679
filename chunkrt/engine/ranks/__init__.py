"""Engines of the leader and of the followers, if several ranks share a model."""
