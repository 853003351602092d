"""Checkpoint weights: what a folder stores, whether it is what a recipe needs, and one rank's
share of it.

Stages, each a module, each usable alone:
    index         headers of the safetensors files; no tensor data is read, nothing is allocated
    quantisation  what config.json says about quantised modules and the KV cache
    stored        which format one listed tensor is stored in, and whether its parts fit together
    manifest      every listed tensor against the folder, by family; extras named (contract: R5)
    loader        slices for one rank, dequantised or as packed parts
    budget        bytes per rank from shapes alone
    quantiser     the way back: plain matrices as NVFP4 and block FP8, for tools
No family is known here: names, shapes and families come from `TensorSpec` lists.
"""
