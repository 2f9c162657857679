"""What a run did: its trace, where the time went, pictures of it."""
