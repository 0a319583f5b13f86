"""The look-up product, for any weight and any GPU."""
