"""NVFP4 experts for many rows an expert: codes become bfloat16 operands of the matrix unit."""
