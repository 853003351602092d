"""The speculative round as one transaction, and the prefill that opens it (contract: T1-T7).

Small functions over static buffers. Nothing here reads a value back from the device, lets a shape
depend on data, or keeps a tensor past its program: the same functions run eagerly and inside a
captured graph.
"""
