"""Engines, their sessions and options: the interface for programs that use chunkrt."""
