"""Parallel: a model over ranks: DDP and FSDP2, tensor parallelism, pipeline stages, dtypes, MFU."""
