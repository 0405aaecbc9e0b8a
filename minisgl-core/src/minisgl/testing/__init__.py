"""Conformance suites that any backend can be run against."""
