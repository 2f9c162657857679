"""What was computed of the first tokens of a prompt, kept for the next that begins with them: in memory and on disk."""
