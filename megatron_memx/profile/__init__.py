"""The minimal set of measurements, where they are kept, and what lies between them."""
