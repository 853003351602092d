"""Prepared programs: which shapes exist, their static buffers, and the backend that runs them
(contract: G1-G6).
"""
