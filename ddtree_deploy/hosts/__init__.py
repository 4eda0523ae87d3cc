"""Ways to start a process on a host; each connector is one file, and `base.py` says what they share."""
