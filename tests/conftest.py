"""Settings for every test."""

from hypothesis import settings

# Machines that share their cores have no steady speed: a slow example is no failing one.
settings.register_profile("kvcs", deadline=None)
settings.load_profile("kvcs")
