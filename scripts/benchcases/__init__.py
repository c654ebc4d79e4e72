"""What ``scripts/bench`` measures, and how: see ``cases``."""
