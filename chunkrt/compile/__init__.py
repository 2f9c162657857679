"""From a checkpoint to an engine directory: plans, calibration, search for schemes, quantised weights."""
