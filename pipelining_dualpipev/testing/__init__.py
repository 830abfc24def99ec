"""Tools to test a schedule with, ours or your own."""

from pipelining_dualpipev.testing.cluster import LocalCluster

__all__ = ["LocalCluster"]
