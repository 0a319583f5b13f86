"""Dense models to BCQ: calibration, choice of method, the run."""
