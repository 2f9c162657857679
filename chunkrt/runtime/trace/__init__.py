"""Traces of runs: files, breakdowns of the time, and pictures."""
