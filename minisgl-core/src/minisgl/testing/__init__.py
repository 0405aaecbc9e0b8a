"""Conformance suites that any backend can be run against, and the parts they are made of.

``pytest --pyargs minisgl.testing --backend KIND:NAME`` runs the suite of one kind of backend. They
need pytest and hypothesis: install ``minisgl-core[testing]``.
"""
