"""What the compiler writes and an engine reads: manifest, plan and weights."""
