"""The leader's and the followers' engines, when several ranks share a model."""
