"""Collectives of one tensor-parallel group behind `Communicator` (contract: A1, S6).

    groups        one rank; several ranks as threads of one process
    distributed   several processes over gloo (CPU) or NCCL (CUDA)
Every implementation hands every rank bit-identical results: routing, selection and sampling are
decided by each rank for itself, so a difference in the last bit would let ranks diverge.
"""
