"""Engines, their sessions and options: what a program that uses chunkrt holds."""
