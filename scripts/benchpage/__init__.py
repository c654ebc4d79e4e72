"""What ``scripts/benchmarks`` runs beside the cases of ``scripts/bench``, and its page."""
