"""Packhorse and other engines on one workload, in turn."""
