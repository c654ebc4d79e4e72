"""Adapters to inference engines, one file each. None of them is imported unless it is used."""
