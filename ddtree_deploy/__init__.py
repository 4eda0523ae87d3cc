"""Carry a known-good Python serving environment from one host to another."""

__version__ = "0.1.0"
