"""Benchmarks: the library beside bare loops that use the same statements, in one run, on one server.

`python -m benchmarks CASE`. A process per variant: the modules in `variants/` are started as programs, and those of the
baseline know nothing of the library, so this package imports nothing by itself.
"""
