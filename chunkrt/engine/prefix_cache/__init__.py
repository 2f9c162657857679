"""The prefix cache: states of the first tokens of prompts, kept in memory and on disk for later prompts that begin with
the same tokens.
"""
