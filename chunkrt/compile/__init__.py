"""From a checkpoint to an engine directory: plans, calibration, schemes that are searched, quantised weights."""
