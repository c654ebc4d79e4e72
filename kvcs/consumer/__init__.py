"""Retrieving a publication: discover, subscribe, verify, deliver.

``retrieval`` is the shell; everything that decides is pure and stands beside it.
"""
