"""Promises of the adopted torch release, checked on the available devices."""
