"""Compilation of a checkpoint to an engine directory: planning, calibration, search for schemes, quantisation."""
