"""Seeing a pipeline from its topics alone: no process is asked.

hearing.py    records of any topic, decoded, for the protocol's own readers
"""
