"""The command line: one module for each subcommand, put together by :mod:`kvcs.cli.main`.

A subcommand has ``add_arguments(parser)`` and ``async run(args) -> int``.
Results go to standard output; everything that is for people goes to standard error.
"""
