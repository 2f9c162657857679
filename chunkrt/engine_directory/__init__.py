"""Output of the compiler and input of an engine: manifest, plan and weights."""
