"""Tokenizers: conversion of text to token ids and back, and of chats to prompts.

A tokenizer is read from a checkpoint when a model is compiled, and kept in the engine directory as tokenizer.json and
text.json.
"""

from chunkrt.tokenizer.decoding import IncrementalDecoder
from chunkrt.tokenizer.text_settings import TextSettings
from chunkrt.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "TextSettings", "Tokenizer"]
